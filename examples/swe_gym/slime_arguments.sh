# Arguments of slime's train_async.py for table 4 of Polar, on one machine with 8 GPUs: 4 train, 4 sample.
# SLIME: checkout of slime. MODELS: folder with Qwen3.5-4B and Qwen3.5-4B_torch_dist. SWE_GYM_RUN: folder of the run.
source "$SLIME/scripts/models/qwen3.5-4B.sh"   # MODEL_ARGS

TABLE_4=(
  --hf-checkpoint "$MODELS/Qwen3.5-4B"
  --prompt-data "$SWE_GYM_RUN/prompts.jsonl"
  --num-rollout 74                 # one epoch: 293 tasks in batches of 4
  --rollout-batch-size 4
  --n-samples-per-prompt 16
  --advantage-estimator grpo
  --optimizer adam
  --lr 1e-6
  --weight-decay 0.1
  --use-tis
)

# What the table leaves out, from its published recipe
RECIPE=(
  --global-batch-size 64           # all 4 x 16 sessions are one step
  --lr-decay-style constant
  --adam-beta1 0.9
  --adam-beta2 0.98
  --eps-clip 0.2
  --eps-clip-high 0.28
  --use-kl-loss
  --kl-loss-coef 0.001
  --kl-loss-type low_var_kl
  --entropy-coef 0
  --rollout-temperature 1
  --rollout-max-response-len 16000
  --rollout-shuffle
)

GANGLINE=(
  --input-key prompt
  --metadata-key metadata
  --rollout-function-path rollout.generate_rollout
  --custom-reward-post-process-path gangline.train.trainers.slime.post_process_rewards
)

MACHINE=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 4
  --rollout-num-gpus 4
  --rollout-num-gpus-per-engine 1
  --tensor-model-parallel-size 2
  --use-dynamic-batch-size
  --max-tokens-per-gpu 30000
  --balance-data
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
  --log-probs-chunk-size 256
  --attention-dropout 0
  --hidden-dropout 0
  --accumulate-allreduce-grads-in-fp32
  --attention-softmax-in-fp32
  --sglang-context-length 50000
  --sglang-mem-fraction-static 0.8
  --sglang-tool-call-parser qwen3_coder
)

CHECKPOINTS=(
  --ref-load "$MODELS/Qwen3.5-4B_torch_dist"
  --load "$SWE_GYM_RUN/checkpoints"
  --save "$SWE_GYM_RUN/checkpoints"
  --save-interval 10
)

ARGUMENTS=(
  "${MODEL_ARGS[@]}" "${TABLE_4[@]}" "${RECIPE[@]}" "${GANGLINE[@]}" "${MACHINE[@]}" "${CHECKPOINTS[@]}"
)
