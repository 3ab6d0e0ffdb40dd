"""Classification: category first, then communication metadata, then the name; a user's file comes in front."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trace_files import row, write_run

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import open_run
from stepscope.analysis.ingest.keep import keep
from stepscope.analysis.ingest.rules import load_rules
from stepscope.tracer.schema import AXES, COLLECTIVES, KINDS, KINETO_COLLECTIVES

COMMUNICATION = """
ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)
ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)
ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)
rccl_main_kernel
void deep_ep::internode::dispatch<true, 8>(int4*, float*, int)
void deep_ep::intranode::combine<__nv_bfloat16, 2, 768>(__nv_bfloat16*, int)
dpsk::ep::dispatch_kernel
void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(RankData*, int)
cross_device_reduce_1stage
void c10d::symmetric_memory::(anonymous namespace)::barrier_kernel<16>(unsigned int**, int)
void c10d::symmetric_memory::wait_signal_kernel(unsigned int**)
void multimem_all_reduce_kernel<__nv_bfloat16, 16>(__nv_bfloat16*)
multimem_all_gather_kernel
triton_multimem_reduce_scatter_0
void (anonymous namespace)::one_shot_all_reduce_kernel<float>(float**)
two_shot_all_reduce_kernel
void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<int>(int)
nvshmemi_transfer_kernel
void nvshmem_put_kernel<int>(int)
mscclpp_allreduce
hcom_allReduce_
aicpu_hccl_kernel
""".strip().splitlines()

COMPUTE = """
void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ncclThing>(int, nccl_args)
hip_softmax_kernel
triton_poi_fused_add_cos_sin_0
ampere_sgemm_128x64_nn
reduce_kernel
all_reduce_my_mind
void cutlass::Kernel<cutlass_80_wmma_tensorop>(Params)
""".strip().splitlines()


@pytest.mark.parametrize(
    ("categories", "kind"),
    [
        (("kernel", "Kernel", "concurrent_kernel", "mtia_ccp_events"), "kernel"),
        (("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"), "memcpy"),
        (
            ("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "xpu_runtime", "xpu_driver", "mtia_runtime"),
            "launch",
        ),
        (("cuda_sync", "gpu_user_annotation", "user_annotation", "cpu_op", "overhead", "python_function", ""), "host"),
    ],
)
def test_categories_of_every_device(categories: tuple[str, ...], kind: str) -> None:
    assert {load_rules().category(category) for category in categories} == {kind}


@pytest.mark.parametrize("name", COMMUNICATION)
def test_communication_by_name(name: str) -> None:
    assert load_rules().communication(name)


@pytest.mark.parametrize("name", COMPUTE)
def test_what_only_looks_like_communication(name: str) -> None:
    assert not load_rules().communication(name)


def test_fused_kernels_are_flagged() -> None:
    fused = [name for name in COMMUNICATION if load_rules().fused(name)]
    assert fused == [name for name in COMMUNICATION if "fusion" in name]


def test_every_collective_by_every_name() -> None:
    rules = load_rules()
    for ours, theirs in KINETO_COLLECTIVES.items():
        assert COLLECTIVES[rules.collective(theirs)] == ours
        assert COLLECTIVES[rules.collective(ours)] == ours
    others = {
        "nccl:all_to_all": "all_to_all",
        "gloo:all_reduce": "all_reduce",
        "_allgather_base": "all_gather",
        "allgather_into_tensor_coalesced": "all_gather",
        "reduce_scatter_single": "reduce_scatter",
        "broadcast_oop": "broadcast",
        "all_reduce_barrier": "barrier",
        "RECV": "receive",
    }
    assert {name: COLLECTIVES[rules.collective(name)] for name in others} == others
    assert rules.collective("wait") == rules.collective("") == -1


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("default_pg", "world"),
        ("mesh_dp", "dp"),
        ("mesh_dp_cp", "dp_cp"),
        ("mesh_tp", "tp"),
        ("mesh_edp", "edp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp_cp"),
        ("DATA_PARALLEL_GROUP", "dp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_DATA_PARALLEL_GROUP", "edp"),
        ("undefined", ""),
    ],
)
def test_axis_of_a_group(description: str, axis: str) -> None:
    code = load_rules().axis(description)
    assert (AXES[code] if code >= 0 else "") == axis


def test_a_users_file_comes_in_front(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[communication]\nnames = ["my_ring_*"]\nexcept = ["nccl_like_gemm"]\n'
        '[categories]\nkernel = ["npu_kernel"]\nhost_not_here = []\n'
    )
    with pytest.raises(StepscopeError, match="no 'host_not_here'"):
        load_rules(str(file))
    file.write_text(
        '[communication]\nnames = ["my_ring_*"]\nexcept = ["nccl_like_gemm"]\n[categories]\nkernel = ["npu_kernel"]\n'
        '[axes]\ntp = ["default_pg"]\n[ranks]\n"node-a*" = 3\n'
    )
    rules = load_rules(str(file))
    assert rules.communication("my_ring_exchange") and not rules.communication("nccl_like_gemm")
    assert rules.communication("ncclDevKernel_Generic") and rules.category("npu_kernel") == "kernel"
    assert rules.category("kernel") == "kernel" and AXES[rules.axis("default_pg")] == "tp"
    assert rules.rank("node-a.json") == 3 and rules.rank("node-b.json") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[communication\n", "no valid TOML"),
        ("[kernels]\nx = []\n", r"no table \[kernels\]"),
        ("[communication]\nnames = 3\n", "list of strings"),
        ('[ranks]\n"a" = "b"\n', "whole numbers"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(StepscopeError, match=says):
        load_rules(str(file))
    with pytest.raises(StepscopeError, match="cannot read the rules"):
        load_rules(str(tmp_path / "absent.toml"))


def test_rules_that_were_changed_meanwhile_are_read_anew(tmp_path: Path) -> None:
    """As in a notebook: the store of the second read is not one of the first rules."""
    file, trace = tmp_path / "mine.toml", tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [row("my_ring", 0, 5)]}))
    file.write_text('[communication]\nnames = ["other"]\n')
    assert open_run(trace, rules=file).columns(0, "kind")["kind"].tolist() == [KINDS.index("compute")]
    file.write_text('\ufeff[communication]\nnames = ["my_ring"]\n', encoding="utf-8")
    assert open_run(trace, rules=file).columns(0, "kind")["kind"].tolist() == [KINDS.index("comm")]


def test_rules_that_would_change_nothing_are_refused(tmp_path: Path) -> None:
    """A run of ours says what its rows are; of one that was imported it was decided when it was."""
    file, trace = tmp_path / "mine.toml", tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [row("my_ring", 0, 5)]}))
    file.write_text('[communication]\nnames = ["my_ring"]\n')
    keep(trace, tmp_path / "kept", rules=file)
    assert open_run(tmp_path / "kept").columns(0, "kind")["kind"].tolist() == [KINDS.index("comm")]
    with pytest.raises(StepscopeError, match="import the traces again with --rules"):
        open_run(tmp_path / "kept", rules=file)
    with pytest.raises(StepscopeError, match="leave out --rules"):
        open_run(write_run(tmp_path / "run"), rules=file)
