#!/usr/bin/env bash
# BERT-base and ALBERT-base in bf16 and fp32 on one NVIDIA GPU: some 75 runs, fifty minutes on an H200.
#
#     experiments/study/on_a_gpu.sh OUT
#     LIMIT_S=540 experiments/study/on_a_gpu.sh OUT    # where a machine is lent for minutes; again to go on
#
# Exit code 0: all is there, and OUT/findings.html compares it with the paper; 75: there is more to do; 1: runs
# failed, which the same command tries again. RUNS=3: of each stage three runs, not five. SIZE=tiny
# shows on any machine that it works.
set -uo pipefail
out=${1:?the folder to work in}
python=${PYTHON:-python3}
failed=0
unset PYTHONDONTWRITEBYTECODE # every run would compile its libraries anew: seconds each

study() {
    local left_s=0 status=0 # no limit
    if [ -n "${LIMIT_S:-}" ]; then
        left_s=$((LIMIT_S - SECONDS))
        [ "$left_s" -ge 40 ] || exit 75 # a run that is cut off is lost
    fi
    timeout --foreground --signal=INT --kill-after=20 "$left_s" \
        "$python" -m smaragdine study "$@" --size "${SIZE:-base}" --keep all --trace-steps 40 --timeout 120 -o "$out" || status=$?
    case $status in
    0) ;;
    1) failed=1 ;;
    124 | 137) exit 75 ;;
    *) exit "$status" ;;
    esac
}

both="bf16,fp32"
study bert --runs 2 --precision "$both"
study albert --runs 2 --precision "$both"
study variants --runs 1 --precision "$both"
study precision --runs 1 --experiments 9 --precision fp32
study precision --runs 1 --experiments 9 --precision bf16
study albert --stage finetune,predict --runs 1 --precision "$both"
study bert --runs "${RUNS:-5}" --precision "$both"
study albert --runs "${RUNS:-5}" --precision "$both"
"$python" -m smaragdine study figures "$out" || failed=1
exit "$failed"
