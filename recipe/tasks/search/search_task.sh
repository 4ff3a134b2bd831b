# The scripts for the made search task source this file after scripts/environment.sh.

# use_hops HOPS: sets, for questions that need so many searches (3, or from 3-5), TASK_NAME, of which the names of data and
# runs are made; COLD_START, the name of a folder under outputs/; DATA_OPTIONS of recipe.tasks.search.data; and
# MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH and CALL_LIMIT.
use_hops() {
    if [[ ! $1 =~ ^[2-9](-[2-9])?$ ]] || [ "${1%-*}" -gt "${1#*-}" ]; then
        echo "error: HOPS=$1: expected 2 to 9, or two of these such as 3-5" >&2
        exit 2
    fi
    TASK_NAME=search_task COLD_START=search_task_sft
    if [ "$1" != 2 ]; then
        TASK_NAME=search_task_${1}hops COLD_START=search_task_${1}hops_sft
    fi
    DATA_OPTIONS=(--min-hops "${1%-*}" --max-hops "${1#*-}")
    # a question has at most 12 + 2 hops tokens, a good answer at most 23 + 26 hops; two wrong turns fit as well
    MAX_PROMPT_LENGTH=$((20 + 2 * ${1#*-})) MAX_RESPONSE_LENGTH=$((76 + 26 * ${1#*-}))
    # the searches and the computation
    CALL_LIMIT=$((${1#*-} + 1))
}

# use_environment tools|chat: with chat the model's own calls, of a model of its own. The template's description of the tools
# has about 520 tokens, and a call with its answer 20 more than in tags.
use_environment() {
    case $1 in
    tools) MODEL_OPTION=--model-dir TASK_MODEL=outputs/search_task_model SFT_DIR=sft ;;
    chat)
        MODEL_OPTION=--chat-model-dir TASK_MODEL=outputs/search_task_chat_model SFT_DIR=sft_chat
        COLD_START=${COLD_START/_sft/_chat_sft} TASK_NAME_SUFFIX=_chat
        MAX_PROMPT_LENGTH=$((MAX_PROMPT_LENGTH + 540)) MAX_RESPONSE_LENGTH=$((MAX_RESPONSE_LENGTH + 30 * CALL_LIMIT))
        ;;
    *)
        echo "error: ENVIRONMENT=$1: expected tools or chat" >&2
        exit 2
        ;;
    esac
}
