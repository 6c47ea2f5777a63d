#!/usr/bin/env bash
# BERT-base and ALBERT-base in bf16 and fp32 on one NVIDIA GPU: some fifty runs, half an hour on an H200.
#
#     experiments/study/on_a_gpu.sh OUT
#     LIMIT_S=540 experiments/study/on_a_gpu.sh OUT    # where a machine is lent for minutes; again to go on
#
# Exit code 0: all is there, and OUT/findings.html compares it with the paper; 75: there is more to do.
set -euo pipefail
out=${1:?the folder to work in}
python=${PYTHON:-python3}

study() {
    if [ -z "${LIMIT_S:-}" ]; then
        "$python" -m smaragdine study "$@" --size "${SIZE:-base}" --keep all --trace-steps 40 -o "$out"
        return
    fi
    # The rest of a run that was cut off is lost: none is begun that could not end.
    left_s=$((LIMIT_S - SECONDS))
    [ "$left_s" -ge 40 ] || exit 75
    timeout --signal=INT --kill-after=20 "$left_s" \
        "$python" -m smaragdine study "$@" --size "${SIZE:-base}" --keep all --trace-steps 40 -o "$out" || {
        [ "$SECONDS" -lt $((LIMIT_S - 1)) ] || exit 75
        exit 1
    }
}

both="--precision bf16,fp32"
study bert --runs 2 $both
study albert --runs 2 $both
study variants --runs 1 $both
study precision --runs 1 --experiments 9 --precision fp32
study precision --runs 1 --experiments 9 --precision bf16
study albert --stage finetune,predict --runs 1 $both
"$python" -m smaragdine study figures "$out"
