#!/usr/bin/env bash
# What is to be measured on one GPU of 80 GB or more, from the project's root:
#     bash tools/gpu.sh MINUTES [OUT_FOLDER]         the folder, default runs/gpu, must not exist
#     STEPS="4 2" bash tools/gpu.sh 10 runs/gpu-2    some steps, in this order; default "1 2 3 4 5 6"
#     SIZE=small START=results/tiny-house bash tools/gpu.sh 15    tries this script on a CPU
# 1  train.py in ALFWorld, with a random model of Qwen2.5-1.5B's shape; then it is resumed; then with
#    adapters, in 24 GB. It wants ALFWorld's games, as train.py does: alfworld-download, or $ALFWORLD_DATA
# 2  one iteration of the paper's setting, in window, in full, and in window with adapters
# 3  SmolLM2 in House: SAPO, SAPO with the flags in $WINNER (if there are any), and SAPO without V and
#    Q, two seeds each, side by side. It wants the imitated model in $START, default runs/start, which
#    results/NOTES.md makes in "A pretrained model"
# 4  ways of attending to the KV cache, in prefill and in decoding
# 5  larger micro-batches
# 6  SAPO beside PPO in one process
# A step has parts, and each of them a limit in seconds. A part is named as FAILED if it fails, if it
# is stopped at its limit, or if it is not begun because less than half of its limit is left of
# MINUTES. The others go on. OUT_FOLDER/NAME.txt has what a part printed, summary.txt how each ended.
minutes=${1:?how many minutes may it take?} out=${2:-runs/gpu}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1  # nothing is downloaded
model=Qwen2.5-1.5B
if [ "$SIZE" = small ]; then
    model=Qwen2.5-small gigabytes=0
    alfworld="--batch_size 2 --max_new_tokens 8 --eval_games 2 --horizon 2"
    iteration="--batch_size 2 --turns 2 --prompt 20 --response 5"
    smollm="--batch_size 2 --horizon 2 --eval_games 2 --iterations 2"
    attention="--cached 50 --new 8 --length 30 --repeats 1"
elif ! gigabytes=$(python -c "import torch; print(torch.cuda.mem_get_info()[1] // 10 ** 9)" 2> /dev/null); then
    echo "gpu.sh: PyTorch finds no GPU here; SIZE=small tries this script on a CPU"
    exit 1
fi
if [ "$gigabytes" -lt 130 ]; then  # there the KV cache of full, or PPO's critic, leaves less room
    less_in_full=--gradient_checkpointing less_beside_ppo="--tokens_per_micro_batch 4096"
fi
mkdir -p "$(dirname "$out")" && mkdir "$out" || exit 1

say() { echo "$*" | tee -a "$out/summary.txt"; }

part() {  # NAME LIMIT COMMAND...
    local name=$1 limit=$2 left=$((60 * minutes - 20 - SECONDS)) began=$SECONDS status
    shift 2
    if [ $((2 * left)) -lt "$limit" ]; then
        say "FAILED $name: not begun, because of its $limit s only $left are left"
        return
    fi
    echo "\$ $*" > "$out/$name.txt"
    # a part that is stopped has 20 s to save what it has
    timeout -k 20 $((left < limit ? left : limit)) "$@" >> "$out/$name.txt" 2>&1
    status=$?
    if [ "$status" = 0 ]; then
        say "done $name: $((SECONDS - began)) s"
    else
        say "FAILED $name: exit status $status (124: stopped at its limit) after $((SECONDS - began)) s"
        tail -n 5 "$out/$name.txt"
    fi
}

step_1() {
    if [ ! -d "${ALFWORLD_DATA:-$HOME/.cache/alfworld}/json_2.1.1" ]; then
        say "FAILED 1: no games; run alfworld-download, or let ALFWORLD_DATA name the folder of json_2.1.1"
        return
    fi
    part folder 60 python tools/bench.py folder "$out/model" --model $model
    part alfworld 240 torchrun train.py --env alfworld --model "$out/model" --iterations 2 \
        --max_new_tokens 100 --eval_games 16 --horizon 10 --out "$out/alfworld" $alfworld
    part resume 120 torchrun train.py --resume --out "$out/alfworld" --iterations 3
    part adapters 240 python -c "
import sys, torch, train
if torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction(24e9 / torch.cuda.mem_get_info()[1])
sys.argv[0] = 'train.py'
train.main()" --env alfworld --model "$out/model" --lora_rank 16 --max_num_seqs 64 \
        --tokens_per_micro_batch 2048 --iterations 2 --max_new_tokens 100 --eval_games 16 --horizon 10 \
        --out "$out/adapters" $alfworld
}

step_2() {
    part window 270 python tools/bench.py iteration --model $model --repeats 1 $iteration
    part full 270 python tools/bench.py iteration --model $model --repeats 1 --context full \
        $less_in_full $iteration
    part adapters-window 270 python tools/bench.py iteration --model $model --repeats 1 \
        --lora_rank 16 $iteration
}

step_3() {
    local start=${START:-runs/start} seed
    if [ ! -e "$start/sapo.json" ]; then
        say "FAILED 3: START=$start is no imitated model; results/NOTES.md, \"A pretrained model\", makes one"
        return
    fi
    house="python train.py --model $start --context full --dtype bfloat16 --old_logprobs rollout
        --batch_size 16 --horizon 12 --mini_batch 64 --max_new_tokens 32 --tokens_per_micro_batch 2048
        --lr 5e-5 --lr_warmup 10 --lr_final_fraction 0 --beta 0.0025 --iterations 40 --eval_games 100
        $smollm"
    for seed in 0 1; do
        part sapo-$seed 240 $house --seed $seed --out "$out/sapo-$seed" &
        [ -z "$WINNER" ] || part winner-$seed 240 $house --seed $seed --out "$out/winner-$seed" $WINNER &
        part novalue-$seed 240 $house --seed $seed --out "$out/novalue-$seed" --c_v 0 --c_q 0 &
    done
    wait
}

step_4() {
    part attention 60 python tools/bench.py attention --model $model $attention
    part attention-4700 60 python tools/bench.py attention --model $model --length 4700 $attention
}

step_5() {  # not here, because they need other code: bfloat16 gradients added in float32, sampling in
    # two passes, fused AdamW, fewer ENV_LATENCY_STEPS, and a KV cache of its full length at once
    for tokens in 8192 16384; do
        part micro-batch-$tokens 100 python tools/bench.py iteration --model $model --repeats 1 \
            --batch_size 64 --turns 10 --tokens_per_micro_batch $tokens $iteration
    done
}

step_6() {
    part ppo 150 python tools/bench.py iteration --ppo --model $model --repeats 1 \
        --batch_size 64 --turns 10 $less_beside_ppo $iteration
}

say "$(python -c "from runtime.checkpoint import versions; print(versions())")"
for n in ${STEPS:-1 2 3 4 5 6}; do step_"$n"; done
! grep -q ^FAILED "$out/summary.txt"
