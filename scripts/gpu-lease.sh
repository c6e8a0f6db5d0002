# SPDX-License-Identifier: Apache-2.0
# gpu-lease.sh -- `gpu-check --lease`: the phases on a rented GPU, the most decisive first. Sourced by gpu-check.
#
# Each phase has the seconds that an H100 should need for it. Its limit is those seconds times a factor: the time left over the time that the
# remaining phases need, from 1 to 3; it never exceeds the time left. A program that reaches its limit is killed and named; after each
# failure the GPU is asked again, and a driver that is gone ends everything.
#
# For rehearsals on the emulated GPU: GPU_CHECK_PHASES replaces the list below, and GPU_CHECK_CLOCK multiplies its seconds; GPU_CHECK_ATTENTION,
# _LINEAR, _STEP, _OVERLAP and _KERNELS are the arguments of measured commands in place of the full shapes, which are still planned.
lease_phases=${GPU_CHECK_PHASES:-"context:8 products:15 right:40 training:20 attention:30 step_fp8:48 step_bf16:64 overlap:15 linear:71 kernels:30 tests:130 full:60"}
lease_end_s=5 # for the summary, and a program that must be killed twice

scale() { awk -v s="$1" -v clock="${GPU_CHECK_CLOCK:-1}" 'BEGIN { printf "%d", s * clock + 0.999 }'; }

# limit PLANNED LEFT NEEDED: seconds of a phase, of those left, where all that remain need NEEDED.
limit() {
    awk -v planned="$1" -v left="$2" -v needed="$3" 'BEGIN {
        factor = left / needed
        if (factor < 1) factor = 1
        if (factor > 3) factor = 3
        seconds = int(planned * factor)
        print seconds < left ? seconds : left
    }'
}

lease_all() {
    timeout_options="-k 1" # with the processes that it started
    deadline=$((start + lease_s - lease_end_s)) needed=0
    for entry in $lease_phases; do needed=$((needed + $(scale "${entry#*:}"))); done
    for entry in $lease_phases; do
        phase=${entry%:*} planned_s=$(scale "${entry#*:}") phase_start=$(date +%s)
        left=$((deadline - phase_start))
        phase_limit_s=$(limit "$planned_s" "$left" "$needed") needed=$((needed - planned_s))
        if [ "$phase_limit_s" -lt 1 ]; then
            say '{"gpu_check":"phase","name":"%s","result":"left out","planned_s":%d,"left_s":%d}\n' "$phase" "$planned_s" "$left"
            continue
        fi
        program_limit_s=$phase_limit_s
        say '{"gpu_check":"phase","name":"%s","planned_s":%d,"limit_s":%d,"left_s":%d}\n' "$phase" "$planned_s" "$phase_limit_s" "$left"
        "lease_$phase"
    done
}

# No program of the phase may take more than half of it.
share_phase() { program_limit_s=$(((phase_limit_s + 1) / 2)); }

lease_context() {
    for loading in LAZY EAGER; do measure "context, $loading" env CUDA_MODULE_LOADING=$loading "$build/bin/bench_gpu_context"; done
}

lease_products() { measure products "$build/bin/bench_gpu_products"; }

# Of all tests these decide whether results are right: clusters, distributed shared memory, layouts of scales, waits for the host.
lease_right="test_linear_cuda test_attention test_kernels_fp8 test_fragments test_cuda_host_stream"
# The others, the shortest first; tests that are not listed are behind them.
lease_order="test_comm_sum test_comm_cuda test_kernels_loss_head test_kernels_layernorm test_kernels_gradients test_cuda_device test_pager_cuda
test_layer_cuda test_kernels test_block_cuda test_step_cuda test_train_cuda_ends test_train_cuda_families test_train_cuda test_train_cuda_losses"

has_test() { grep -qx "$1" "$build/gpu-tests.txt"; }

lease_right() {
    share_phase
    for name in $lease_right; do
        if has_test "$name"; then run_test "$name"; fi
    done
}

lease_tests() {
    share_phase
    known=" $(echo $lease_right $lease_order) "
    for name in $lease_order; do
        if has_test "$name"; then run_test "$name"; fi
    done
    while read -r name; do
        case $name in test_train_full_* | test_train_modules_*) continue ;; esac
        case $known in *" $name "*) ;; *) run_test "$name" ;; esac
    done <"$build/gpu-tests.txt"
}

lease_full() {
    share_phase
    while read -r name; do
        case $name in test_train_full_* | test_train_modules_*) run_test "$name" ;; esac
    done <"$build/gpu-tests.txt"
}

lease_training() {
    share_phase
    training
}

lease_attention() {
    for tokens in 4096 8192; do
        bench "attention, $tokens tokens" attention --device cuda --tokens "$tokens" --heads 128 --kv_heads 8
    done
}

# One step of the published job's rank among eight, in both dtypes with the same keys: bf16 takes more memory.
lease_step() {
    # shellcheck disable=SC2086  # keys and values
    if choose "$offloads" $of_8 --compute_dtype bf16 || choose "$offloads" $of_8 --compute_dtype "$1"; then
        step $of_8 --compute_dtype "$1" --steps 1 $remedy
    fi
}
lease_step_fp8() { lease_step fp8; }
lease_step_bf16() { lease_step bf16; }

lease_overlap() {
    # shellcheck disable=SC2086  # numbers
    measure overlap "$build/bin/bench_gpu_overlap" ${GPU_CHECK_OVERLAP:-}
}

lease_linear() {
    bench "linear llama3.1-405b, 4096 tokens, r 16" linear --device cuda --model llama3.1-405b --formats fp8_row,fp8_block --tokens 4096 \
        --lora_r 16 --runs 5 --micro_batches 4 --time_algorithms false
}

lease_kernels() {
    # shellcheck disable=SC2086  # numbers
    measure kernels "$build/bin/bench_gpu_kernels" ${GPU_CHECK_KERNELS:-}
}

# Failing calls of the CUDA runtime are part of some tests. Clusters run nowhere but on a GPU.
lease_sanitize_all() {
    timeout_options="-k 1" phase_limit_s=$((lease_s - lease_end_s)) phase_start=$start
    for name in test_attention test_linear_cuda test_kernels; do
        for tool in racecheck memcheck; do
            has_test "$name" || continue
            program_limit_s=$(($(left_s) / 2))
            case $tool in
            racecheck) sanitize racecheck "$name" --kernel-name kns=_kernel ;;
            memcheck) sanitize memcheck "$name" --report-api-errors no ;;
            esac
        done
    done
}
