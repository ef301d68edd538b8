#!/usr/bin/env bash
# Everything that is to be measured on one GPU of 80 GB (7B: 140), from the project's root:
#     bash tools/gpu.sh
# It takes some hours, and wants alfworld-download first. What is printed is kept in runs/gpu/NAME.txt;
# curves, tables and evaluations are in the runs' own folders. A step that fails is named, and the
# others go on. A second start wants runs/gpu, and runs/alfworld-*, out of the way.
mkdir -p runs && mkdir runs/gpu || exit 1
python -c "import torch; torch.cuda.get_device_name()" || exit 1

step() {
    name=$1; shift
    echo "== $name: $*"
    "$@" 2>&1 | tee "runs/gpu/$name.txt"
    [ "${PIPESTATUS[0]}" = 0 ] || echo "== $name failed" | tee -a runs/gpu/failed.txt
}

python -c "import torch, transformers as t; print(torch.cuda.get_device_name(), torch.__version__, t.__version__)" \
    | tee runs/gpu/versions.txt
git rev-parse HEAD >> runs/gpu/versions.txt
step tests python -m pytest -q  # those of captured graphs run as well

# The sampler beside generate, with shares of what the hardware could do.
sampler="tools/bench.py sampler --model Qwen2.5-1.5B --random_weights --rows 128 --prompt 900"
step sampler-uncompiled python $sampler --new 200 --repeats 5
step sampler python $sampler --new 200 --repeats 5 --compile

# The paper's iteration: an eighth of it, SAPO beside PPO, then the whole of it. 7B for its memory.
gigabytes=$(python -c "import torch; print(torch.cuda.get_device_properties(0).total_memory // 10 ** 9)")
iteration="tools/bench.py iteration --tokens_per_micro_batch $([ "$gigabytes" -lt 130 ] && echo 4096 || echo 16384)"
step sapo-ppo-uncompiled python $iteration --ppo --model Qwen2.5-1.5B --batch_size 16 --repeats 2 \
    --no-compile
step sapo-ppo python $iteration --ppo --model Qwen2.5-1.5B --batch_size 16 --repeats 2
step sapo-ppo-rollout python $iteration --ppo --model Qwen2.5-1.5B --batch_size 16 --repeats 2 \
    --old_logprobs rollout
step whole python $iteration --model Qwen2.5-1.5B --repeats 1
step 7b python tools/bench.py iteration --model Qwen2.5-7B --batch_size 4 --repeats 1 --gradient_checkpointing \
    --optim_state_dtype bfloat16

# A small pretrained model imitates the demonstrator, then trains by three methods.
step imitate python tools/imitate.py --env alfworld --model SmolLM2-135M-Instruct --steps 200 \
    --lr 1e-4 --max_new_tokens 64 --out runs/gpu/start
[ -d runs/gpu/start ] || exit 1
for method in sapo grpo "ppo --critic_lr 1e-4"; do
    algo=${method%% *}
    step "alfworld-$algo" python train.py --env alfworld --model runs/gpu/start --algo $method \
        --lr 1e-5 --iterations 25 --max_new_tokens 64 --tokens_per_micro_batch 65536 \
        --out "runs/alfworld-$algo"
    step "unseen-$algo" python eval.py --model "runs/alfworld-$algo" --split valid_unseen
done
[ ! -e runs/gpu/failed.txt ]
