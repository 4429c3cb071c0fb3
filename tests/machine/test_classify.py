import signal

import pytest

from dwslm.machine.classify import RETRIES, Evidence, back_off, classify

DONE = {"event": "done"}
PREEMPTED = {"event": "preempted", "reason": "SIGTERM"}
INDUCTOR = (
    'Traceback (most recent call last):\n  File "torch/_inductor/codecache.py", line 2861, in load\n'
    "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\n"
)
TRITON = '  File "/usr/lib/python3/site-packages/triton/compiler/compiler.py", line 300, in __init__\n'


def failed(error, reason=""):
    return {"event": "failed", "error": error, "reason": reason}


@pytest.mark.parametrize(
    ("evidence", "kind"),
    [
        (Evidence(0), "done"),
        (Evidence(1, DONE), "done"),  # a launcher that failed after the run had ended
        (Evidence(75), "preempted"),
        (Evidence(1, PREEMPTED), "preempted"),  # torchrun turns 75 into 1
        (Evidence(130), "preempted"),
        (Evidence(-signal.SIGINT), "preempted"),
        (Evidence(-signal.SIGKILL), "killed"),
        (Evidence(-signal.SIGTERM), "killed"),
        (Evidence(-signal.SIGKILL, oom_kills=1), "out_of_memory"),
        (Evidence(137, hang="step: silent"), "hang"),
        (Evidence(0, hang="step: silent"), "hang"),
        (Evidence(-signal.SIGSEGV), "crash"),
        (Evidence(1, text="Traceback\nKeyError: 'x'"), "crash"),
        (Evidence(1, text="error: train.tokens=0 must be 1 or more"), "bad_configuration"),
        (Evidence(2, text="usage: dwslm [-h]\ndwslm: error: the following arguments are required"), "bad_configuration"),
        (Evidence(1, text="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (Evidence(1, failed("OutOfMemoryError", "CUDA out of memory")), "out_of_memory"),
        (Evidence(1, failed("FloatingPointError", "the loss is nan at step 5")), "non_finite"),
        (Evidence(1, text="error: the loss is inf at step 5; look at grad_norm"), "non_finite"),
        (Evidence(1, text="error: cannot save checkpoint x: No space left on device"), "disk_full"),
        (Evidence(1, text="RuntimeError: CUDA error: an illegal memory access was encountered"), "cuda_error"),
        (Evidence(1, text="RuntimeError: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), "cuda_error"),
        (Evidence(-signal.SIGABRT, text="[Rank 0] Watchdog caught collective operation timeout: x"), "cuda_error"),
        (Evidence(1, failed("RuntimeError", "something"), xid=[31]), "cuda_error"),
        (Evidence(1, failed("RuntimeError", "CUDA error: unknown"), xid=[79]), "hardware"),
        (Evidence(1, text=INDUCTOR + "ImportError: /c/hm/chm.main.so: file too short"), "damaged_cache"),
        (Evidence(1, text=INDUCTOR + "AttributeError: module 'cpe' has no attribute 'call'"), "damaged_cache"),
        (Evidence(1, text=INDUCTOR + "torch._inductor.exc.InductorError: CppCompileError: C++ compile error"), "damaged_cache"),
        (Evidence(1, text=TRITON + "json.decoder.JSONDecodeError: Expecting value: line 1 column 1"), "damaged_cache"),
        (Evidence(1, text=TRITON + "RuntimeError: Triton Error [CUDA]: device kernel image is invalid"), "damaged_cache"),
        (Evidence(1, text="RuntimeError: Triton Error [CUDA]: invalid argument"), "cuda_error"),
        (Evidence(1, text="error: rank 3 (pid 77 on node-2) has died; last seen in loop.py:138 _steps"), "killed"),
        (Evidence(1, failed("RankLost", "rank 0 (pid 7 on a) has kept the others waiting for 41 s; last seen in x")), "hang"),
        (Evidence(1, failed("RankLost", "rank 3 has not come within 301 s")), "hang"),
        (Evidence(1, text="error: rank 3 has not come within 301 s"), "hang"),
        (
            Evidence(1, text="error: rank 0 or its launcher is gone, and the ranks' meeting place with it: DistNetworkError: x"),
            "killed",
        ),
        (Evidence(1, failed("RankLost", "no rank has moved for 90 s; rank 2 was the last that did")), "hang"),
        (Evidence(1, failed("RankLost", "rank 2 failed: OutOfMemoryError: CUDA out of memory")), "out_of_memory"),
        # The same errors of other files are no damaged cache.
        (Evidence(1, text="json.decoder.JSONDecodeError: Expecting value: line 1 column 1"), "crash"),
        # A compiler's warning about an entry that it passed over is no end.
        (Evidence(1, text="W1129 20:19 torch/_inductor/codecache.py] EOFError: Ran out of input\nerror: x"), "bad_configuration"),
    ],
)  # fmt: skip
def test_kinds(evidence, kind):
    assert classify(evidence).kind == kind


def test_reasons_are_one_line_that_names_the_cause():
    assert classify(Evidence(1, failed("ValueError", "no good"))).reason == "ValueError: no good"
    assert classify(Evidence(1, text="noise\nerror: say this\n")).reason == "exit code 1: say this"
    assert classify(Evidence(-9)).reason == "killed by SIGKILL"
    reason = classify(Evidence(1, text="Traceback:\n  x\ntorch.AcceleratorError: CUDA error: y\nhint")).reason
    assert reason == "exit code 1: torch.AcceleratorError: CUDA error: y"
    assert classify(Evidence(1, failed("X"), xid=[79])).reason.startswith(
        "Xid 79: GPU has fallen off the bus; reboot. X"
    )


def test_what_needs_a_person_is_not_tried_again():
    never = {kind for kind, retries in RETRIES.items() if retries == 0}
    assert never == {"done", "preempted", "bad_configuration", "out_of_memory", "non_finite", "hardware"}
    assert [back_off(n) for n in (1, 2, 3, 9)] == [30, 120, 600, 600]
