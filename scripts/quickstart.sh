#!/usr/bin/env bash
# From nothing to a trained and evaluated model on a laptop without GPU: set-up, tiny model, Countdown data, warm start,
# a GRPO run of about 3 minutes, evaluation, table, curves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
source scripts/environment.sh
use_hardware cpu

SEED=${SEED:-0}
RUN=quickstart_grpo_seed$SEED
STEPS=${STEPS:-36}

echo "== 1/4 warm start"
[ -d outputs/warm_start/huggingface ] || HARDWARE=cpu bash recipe/common/run_warm_start.sh
echo "== 2/4 GRPO, $STEPS steps"
HARDWARE=cpu SEED=$SEED EXPERIMENT_NAME=$RUN bash recipe/common/run_grpo_countdown.sh \
    trainer.total_training_steps="$STEPS" trainer.test_freq="$STEPS" trainer.save_freq="$STEPS" trainer.val_before_train=false
echo "== 3/4 evaluation of both on held-out problems"
python scripts/evaluate.py warm_start --task countdown --model outputs/warm_start/huggingface >outputs/warm_start/eval.log 2>&1
python scripts/evaluate.py "$RUN" --task countdown >"outputs/$RUN/eval.log" 2>&1
python scripts/read_log.py outputs/results/warm_start.log "outputs/results/$RUN.log" --output outputs/results/quickstart.csv
echo "== 4/4 results"
python - "outputs/results/quickstart.csv" <<'END'
import sys
import pandas as pd

print(pd.read_csv(sys.argv[1]).round(3).to_string(index=False))
END
echo "curves: outputs/$RUN/curves.png   model: outputs/$RUN/global_step_$STEPS/actor/huggingface   table: outputs/results/quickstart.csv"
