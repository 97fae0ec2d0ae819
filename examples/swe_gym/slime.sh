#!/bin/bash
# Train with slime on this machine's 8 GPUs. The rollout server runs, and nodes without engines:
#   SLIME=/opt/slime MEGATRON=/opt/Megatron-LM MODELS=/models SWE_GYM_RUN=/data/swe-gym ./slime.sh
set -euo pipefail
: "${SLIME:?checkout of slime}" "${MEGATRON:?checkout of Megatron-LM}" "${MODELS:?folder of the models}"
: "${SWE_GYM_RUN:?folder of the run, with prompts.jsonl}" "${GANGLINE_TOKEN:?control token of the rollout server}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/slime_arguments.sh"

# Ray's workers take their variables from the Ray that they are started by.
export SWE_GYM_RUN SWE_GYM_TOKEN="$GANGLINE_TOKEN"
export PYTHONPATH="$here:$SLIME:$MEGATRON${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_DEVICE_MAX_CONNECTIONS=1   # Megatron's tensor parallelism asks for it
trap 'ray stop' EXIT
ray start --head --port 6379 --num-gpus 8 --disable-usage-stats
RAY_ADDRESS=127.0.0.1:6379 python3 "$SLIME/train_async.py" "${ARGUMENTS[@]}"
