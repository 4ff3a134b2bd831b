# quoted TEXT: the text for Hydra, which reads it as it is, whatever its letters and signs; a list in brackets stays a list
quoted() {
    case "$1" in
    \[*) printf %s "$1" ;;
    *) printf "'%s'" "${1//\'/\\\'}" ;;
    esac
}
