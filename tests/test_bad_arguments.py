"""Bad input raises ValueError with the argument, its value and the allowed values.

All tests run in one process without a group.
"""

import re
import sys
import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import distca
from distca import _library
from distca.planning.plan import CAUSAL, local_plan

DOCUMENTS = distca.Documents([0, 3, 8])


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape).to(dtype)


THD, BHSD = rows(8, 2, 4), rows(1, 2, 8, 4)

CORE_ATTENTION = {  # q, k, v and a part of the message
    "2-D": (THD[0], THD[0], THD[0], "q has shape [2, 4]; expected [tokens, heads, head_dim]"),
    "int": (
        *[THD.int()] * 3,
        "q is Int; core attention on CPU takes float64, float32, bfloat16 or float16",
    ),
    "k of another dtype": (THD, THD.double(), THD, "k is Double, q is Float; expected one dtype"),
    "v of another dtype": (THD, THD, THD.double(), "v is Double, q is Float; expected one dtype"),
    "v has fewer heads": (
        *(THD, THD, THD[:, :1]),
        "k has shape [8, 2, 4], v [8, 1, 4]; expected equal shapes except for head_dim",
    ),
    "v has fewer tokens": (THD, THD, THD[1:], "k has shape [8, 2, 4], v [7, 2, 4]; expected equal"),
    "v has no head_dim": (THD, THD, rows(8, 2, 0), "v has shape [8, 2, 0]; expected at least one"),
    "heads": (rows(8, 3, 4), THD, THD, "q has 3 heads, k 2; expected a multiple"),
    "head_dim": (
        THD,
        *[rows(8, 2, 6)] * 2,
        "q has head_dim 4, k 6; expected one head_dim for both",
    ),
    "no heads": (*[rows(8, 0, 4)] * 3, "q has shape [8, 0, 4]; expected at least one head"),
    "no head_dim": (*[rows(8, 2, 0)] * 3, "q has shape [8, 2, 0]; expected at least one head"),
    "tokens": (*[THD[1:]] * 3, "q has 7 tokens, but the documents of this rank have 8; pass"),
    "key tokens": (THD, THD[1:], THD[1:], "q has 8 tokens, k 7; expected equal numbers"),
    "meta device": (*[THD.to("meta")] * 3, "q is on meta; expected cpu or cuda"),
    "k on meta device": (THD, THD.to("meta"), THD, "k is on meta; expected cpu or cuda"),
    "0-D": (*[THD[0, 0, 0]] * 3, "q has shape []; expected [tokens, heads, head_dim]"),
}


@pytest.mark.parametrize("case", CORE_ATTENTION)
def test_core_attention_refuses(case):
    q, k, v, message = CORE_ATTENTION[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        distca.core_attention(q, k, v, DOCUMENTS)


@pytest.mark.parametrize(
    "window_size", [(-2, 0), (0, -7), (1, 2, 3), (1.5, 0), "ab", None, 3, (2**31, 0)]
)
def test_windows_are_refused(window_size):
    message = re.escape(f"window_size is {window_size!r}; expected (left, right)")
    with pytest.raises(ValueError, match=message):
        distca.core_attention(THD, THD, THD, DOCUMENTS, window_size=window_size)
    with (
        pytest.raises(ValueError, match=message),
        distca.documents(DOCUMENTS, window_size=window_size),
    ):
        pass


@pytest.mark.parametrize(
    "sinks, described",
    [
        (torch.ones(3), "Tensor of torch.float32 and shape [3] on cpu"),
        (torch.ones(1, 2), "Tensor of torch.float32 and shape [1, 2] on cpu"),
        (torch.nn.Parameter(torch.ones(())), "Parameter of torch.float32 and shape [] on cpu"),
        (torch.ones(2, dtype=torch.int64), "Tensor of torch.int64 and shape [2] on cpu"),
        (torch.ones(2, device="meta"), "Tensor of torch.float32 and shape [2] on meta"),
    ],
)
def test_sinks_are_refused(sinks, described):
    message = re.escape(f"sinks is a {described}; expected a floating-point tensor of shape [2]")
    with pytest.raises(ValueError, match=message):
        distca.core_attention(THD, THD, THD, DOCUMENTS, sinks=sinks)


@pytest.mark.parametrize("documents", [torch.tensor([0, 8]), [0, 8], None])
def test_what_is_not_documents_is_refused(documents):
    message = f"documents is a {type(documents).__name__}, .*; expected distca.Documents"
    with pytest.raises(ValueError, match=message):
        distca.core_attention(THD, THD, THD, documents)
    with pytest.raises(ValueError, match=message), distca.documents(documents):
        pass


def test_sharded_documents_need_a_plan():
    documents = distca.Documents.sharded([16], 0, 2)
    with pytest.raises(
        ValueError, match=r"cross ranks and have no plan.*distca\.plan\(documents\)"
    ):
        distca.core_attention(THD, THD, THD, documents)


SDPA = {
    "attn_mask": ((BHSD, BHSD, BHSD), {"attn_mask": rows(8, 8)}, "attn_mask of shape [8, 8]"),
    "dropout_p": ((BHSD, BHSD, BHSD), {"dropout_p": 0.1}, "dropout_p is 0.1"),
    "3-D": ((BHSD[0],) * 3, {}, "query has shape [2, 8, 4]"),
    "3-D key": ((BHSD, BHSD[0], BHSD[0]), {}, "key has shape [2, 8, 4]"),
    "1-D value": ((BHSD, BHSD, BHSD[0, 0, 0]), {}, "value has shape [4]"),
    "cross attention": ((BHSD, *[rows(1, 2, 9, 4)] * 2), {}, "query has 8 tokens, key 9"),
    "GQA": ((BHSD, *[rows(1, 1, 8, 4)] * 2), {}, "query has 2 heads, key 1; pass enable_gqa=True"),
    "tokens": ((rows(1, 2, 9, 4),) * 3, {}, "9 tokens, but the documents of this rank have 8"),
    "batch": ((rows(2, 2, 8, 4),) * 3, {}, "16 tokens, but the documents of this rank have 8"),
}


@pytest.mark.parametrize("case", SDPA)
def test_sdpa_under_documents_refuses(case):
    inputs, arguments, message = SDPA[case]
    with distca.documents(DOCUMENTS), pytest.raises(ValueError, match=re.escape(message)):
        distca.scaled_dot_product_attention(*inputs, **arguments)


def test_sdpa_without_documents_accepts_torchs_arguments():
    mask = torch.ones(8, 8, dtype=torch.bool)
    distca.scaled_dot_product_attention(BHSD, BHSD, BHSD, attn_mask=mask)
    distca.scaled_dot_product_attention(BHSD[0], BHSD[0], BHSD[0])


CU_SEQLENS = torch.tensor([0, 3, 8], dtype=torch.int32)
OTHER_CU_SEQLENS = torch.tensor([0, 4, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    "cu_seq_q, cu_seq_k, arguments, message",
    [
        (OTHER_CU_SEQLENS, OTHER_CU_SEQLENS, {}, "cu_seq_q .*same packing"),
        (CU_SEQLENS, OTHER_CU_SEQLENS, {}, "cu_seq_k .*same packing"),
        (CU_SEQLENS[:2], CU_SEQLENS[:2], {}, "cu_seq_q has 2 boundaries"),
        (CU_SEQLENS[2], CU_SEQLENS, {}, r"cu_seq_q has 1 boundaries up to \[8\]"),
        (CU_SEQLENS + 0.5 * CU_SEQLENS.clamp(max=1), CU_SEQLENS, {}, "cu_seq_q .*same packing"),
        (CU_SEQLENS.long() + 2**32, CU_SEQLENS, {}, "cu_seq_q .*same packing"),
        (CU_SEQLENS, CU_SEQLENS, {"window_size": (-3, 0)}, "window"),
        (CU_SEQLENS, None, {}, "cu_seq_k is None"),
        (CU_SEQLENS, CU_SEQLENS, {"num_splits": 1}, "num_splits is a int under .* expected None"),
        (CU_SEQLENS, None, {"block_table": CU_SEQLENS}, "block_table is a Tensor under"),
    ],
)
def test_varlen_under_documents_refuses(cu_seq_q, cu_seq_k, arguments, message):
    with distca.documents(DOCUMENTS), pytest.raises(ValueError, match=message):
        distca.varlen_attention(THD, THD, THD, cu_seq_q, cu_seq_k, 5, 5, **arguments)


def test_varlen_notices_boundaries_that_changed_in_place():
    cu_seqlens = CU_SEQLENS.clone()
    with distca.documents(DOCUMENTS):
        distca.varlen_attention(THD, THD, THD, cu_seqlens, cu_seqlens, 5, 5)
        cu_seqlens[1] = 4
        with pytest.raises(ValueError, match="cu_seq_q"):
            distca.varlen_attention(THD, THD, THD, cu_seqlens, cu_seqlens, 5, 5)


def test_varlen_compares_boundaries_once(monkeypatch):
    cu_seq_q, cu_seq_k = CU_SEQLENS.clone(), CU_SEQLENS.clone()
    documents, read = distca.Documents(CU_SEQLENS), []
    monkeypatch.setattr(
        distca.Documents, "cu_seqlens", property(lambda _: read.append(1) or CU_SEQLENS)
    )
    with distca.documents(documents):
        for _ in range(3):
            distca.varlen_attention(THD, THD, THD, cu_seq_q, cu_seq_k, 5, 5)
    assert len(read) == 2, "once for cu_seq_q and once for cu_seq_k"


@pytest.mark.parametrize(
    "cu_seqlens",
    [
        *([], [1, 2], [0, 2, 1], [[0, 1]], [0, -1], 5, [0, 1.5], ["a"], None),
        *([0, 2**31], [0, 2**70], [0, 2**63 - 1, -2]),
    ],
)
def test_documents_refuse_cu_seqlens(cu_seqlens):
    with pytest.raises(ValueError, match="cu_seqlens"):
        distca.Documents(cu_seqlens)


@pytest.mark.parametrize(
    "lengths, rank, world_size, name",
    [
        ([-1], 0, 1, "lengths"),
        ([[3]], 0, 1, "lengths"),
        ([2.5], 0, 1, "lengths"),
        ([2**62, 2**62], 0, 1, "lengths"),
        ([2**32 - 1], 0, 2, "lengths"),
        (None, 0, 1, "lengths"),
        ([3], 1, 1, "rank is 1"),
        ([3], -1, 2, "rank is -1"),
        ([3], 0, 0, "world_size"),
        ([3], 0.0, 1, "rank is 0.0"),
        ([3], None, 1, "rank is None"),
        ([3], 0, 2.0, "world_size is 2.0"),
    ],
)
def test_sharded_documents_refuse(lengths, rank, world_size, name):
    with pytest.raises(ValueError, match=name):
        distca.Documents.sharded(lengths, rank, world_size)


@pytest.mark.parametrize("runs", [0, 3, None, 1.5])
def test_numbers_of_runs_are_refused(runs):
    with pytest.raises(ValueError, match=f"runs is {runs}; expected 1 or 2"):
        distca.Documents.sharded([8], 0, 2, runs=runs)


@pytest.mark.parametrize("pack", [-1, 2**31, None, 1.5])
def test_numbers_of_packs_are_refused(pack):
    with pytest.raises(ValueError, match=f"pack is {pack}; expected the number of a pack"):
        distca.Documents.sharded([8], 0, 2, pack=pack)


def test_two_runs_hold_as_many_tokens_as_one():
    with pytest.raises(ValueError, match="2 rank.s. hold at most 2147483646 each"):
        distca.Documents.sharded([2**32 - 2], 0, 2, runs=2)
    full = distca.Documents.sharded([2**32 - 4], 1, 2, runs=2)
    assert full.num_tokens == 2**31 - 2


NOT_A_NUMBER, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    "name, value",
    [
        *[("tolerance", value) for value in (-0.1, 1, NOT_A_NUMBER)],
        *[("tolerance", "a"), ("server_speeds", 1.0), ("transport", None)],
        *[("timeout_s", value) for value in (0, -1, INFINITE, None, 1e10)],
        *[(name, value) for name in ("ranks_per_node", "rounds") for value in (0, 1.5, True)],
        *[("rounds", None), ("ranks_per_node", 2**40)],
        *[("attention_tflops", value) for value in (0, NOT_A_NUMBER, 1e300)],
        *[("link_gb_per_s", value) for value in (-200, INFINITE)],
        *[(name, 1e300) for name in ("memory_cap_gb", "keep_inputs_gb", "peer_memory_gb")],
        *[(name, "no") for name in ("enabled", "deterministic", "balance_no_grad")],
    ],
)
def test_options_refuse(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}; expected")):
        distca.Options(**{name: value})


@pytest.mark.parametrize("values", [("a", 2, 8), (4.5, 1, 8), (4, -1, 8), (4, 2, 2**70)])
def test_shapes_refuse(values):
    with pytest.raises(ValueError, match="heads_q|heads_kv|head_dim"):
        distca.AttentionShape(*values)


@pytest.mark.parametrize("value", [0.5, 1.9, None, True])
def test_numbers_of_context_rows_are_refused(value):
    with pytest.raises(ValueError, match=f"num_context_rows is {value}; expected an integer"):
        distca.Documents([0, 3, 8], num_context_rows=value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": None}, "q is a NoneType; expected a tensor"),
        ({"k": THD.numpy()}, "k is a ndarray; expected a tensor"),
        ({"v": THD.to_sparse()}, "v has layout torch.sparse_coo"),
        ({"softmax_scale": "a"}, "softmax_scale is 'a'; expected a finite number"),
        ({"softmax_scale": NOT_A_NUMBER}, "softmax_scale is nan; expected a finite number"),
        ({"sinks": 1.0}, "sinks is 1.0; expected a tensor"),
    ],
)
def test_other_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        distca.core_attention(**{"q": THD, "k": THD, "v": THD, "documents": DOCUMENTS, **change})


def test_torch_distributed_must_be_initialised():
    for call in (distca.init, lambda: distca.plan(DOCUMENTS)):
        with pytest.raises(RuntimeError, match=r"not initialised; call .*init_process_group\(\)"):
            call()
    distca.close()


def test_an_unknown_group_is_refused():
    plan = local_plan(DOCUMENTS, CAUSAL, torch.device("cpu"))
    for call in (
        lambda: torch.ops.distca.core_attention(
            THD, THD, THD, plan.layout, plan.rows, 1.0, "unknown"
        ),
        lambda: torch.ops.distca.exchange(THD, THD, THD, plan.layout, plan.rows, "unknown"),
        lambda: torch.ops.distca.attention_shape("unknown"),
        lambda: torch.ops.distca.open_session("unknown", "unknown", "unknown", "", 1.0),
    ):
        with pytest.raises((ValueError, RuntimeError), match="unknown"):
            call()


@pytest.mark.skipif(b"libcudart" in _library.LIBRARY.read_bytes(), reason="this library has CUDA")
def test_a_library_without_cuda_refuses_cuda_tensors():
    """Call the CUDA binding with fake tensors, which only claim to be on a device."""
    plan = local_plan(DOCUMENTS, CAUSAL, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q = torch.empty(8, 2, 4, device="cuda")
        on_device = torch.empty(plan.rows.shape, dtype=torch.int32, device="cuda")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(
        ValueError, match="q is on cuda:0, but distca was built without CUDA.*FORCE_CUDA=1"
    ):
        torch.ops.distca.core_attention.default.redispatch(
            keys, q, q, q, plan.layout, on_device, 1.0, ""
        )


def test_a_library_for_another_torch_is_refused(tmp_path, monkeypatch):
    running, built = torch.__version__.split("+")[0], _library.built_for(_library.LIBRARY)
    assert built.split(".")[:2] == running.split(".")[:2]
    other = "9" + built[1:]
    content = _library.LIBRARY.read_bytes()
    marker = b"distca-built-for-torch:"
    assert content.count(marker + built.encode()) == 1
    path = tmp_path / "_C.so"
    path.write_bytes(content.replace(marker + built.encode(), marker + other.encode()))
    with pytest.raises(ImportError) as raised:
        _library.load(path)
    for part in (f"torch {other}", f"torch {running}", "pip install --force-reinstall"):
        assert part in str(raised.value)
    monkeypatch.setattr(torch, "__version__", ".".join([*running.split(".")[:2], "99+cpu"]))
    _library.load()  # of the same minor version


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF" + bytes(4096)])
def test_other_files_than_the_library_are_refused(tmp_path, content):
    path = tmp_path / "_C.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ImportError, match=r"_C\.so is .*pip install --force-reinstall"):
        _library.load(path)


def test_sources_without_a_library_name_the_package_that_they_hide(tmp_path, monkeypatch):
    sources, installed = tmp_path / "clone" / "distca", tmp_path / "site-packages" / "distca"
    for folder in (sources, installed):
        folder.mkdir(parents=True)
    (tmp_path / "clone" / "setup.py").touch()
    monkeypatch.setattr(sys, "path", [str(each.parent) for each in (sources, installed)])
    with pytest.raises(ImportError, match=r"is missing; build it .*--no-deps -e \S+/clone`"):
        _library.load(sources / "_C.so")
    (installed / "_C.so").touch()
    with pytest.raises(ImportError, match=rf"that is installed in {installed}; run"):
        _library.load(sources / "_C.so")


def test_attention_refuses_a_capture(monkeypatch):
    """A CUDA graph would repeat the call with the documents of this step, also by the drop-in."""
    q, documents = torch.ones(8, 2, 4), distca.Documents([0, 8])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    with pytest.raises(ValueError, match="core attention is captured into a CUDA graph"):
        distca.core_attention(q, q, q, documents)
    heads_first = q.transpose(0, 1)[None]
    distca.scope.put_in_force(documents)
    try:
        with pytest.raises(ValueError, match="captured into a CUDA"):
            distca.scaled_dot_product_attention(heads_first, heads_first, heads_first)
    finally:
        distca.scope.put_in_force(None)
