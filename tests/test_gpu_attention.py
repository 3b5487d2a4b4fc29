"""The attention kernels of a CUDA device on one rank's task lists, without a process group."""

import pytest
import torch
from plain_attention import (
    Heads,
    Inputs,
    Outside,
    Results,
    attend,
    deterministic_mode,
    ops,
    random_inputs,
    reference,
)
from task_lists import Document, TaskList, cut, task_list, whole

import distca

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]
MODES = [False, True]  # deterministic
SIGNS = [1, -1]  # of softmax_scale: only PyTorch's kernels take negative ones
MASKS = {"causal": (-1, 0), "full": (-1, -1), "window": (200, 0), "self": (0, 0), "five": (5, 0)}
TWO_SIDED = [(64, 32), (0, 130), (-1, 5), (130, -1)]

# Around the sizes of tiles. Odd lengths shift the documents after them off any multiple.
LENGTHS = [3, 63, 64, 65, 1, 127, 128, 129, 191, 192, 193, 255, 256, 257, 5, 1000]
SHARDS = [300, 1, 128, 64, 100]
GQA = Heads(8, 2, 128)
WIDTHS = [
    GQA._replace(head_dim=head_dim, head_dim_v=head_dim_v)
    for head_dim, head_dim_v in ((64, None), (128, None), (192, None), (192, 128), (256, None))
]
ODD_WIDTH = GQA._replace(head_dim=96)
ODD_GROUPS = [Heads(2, 2, 64), Heads(6, 2, 64)]  # short tiles are packed, not heads


def widths(heads: Heads) -> str:
    """Return the widths of heads as a test id."""
    return ":".join(str(dim) for dim in (heads.head_dim, heads.head_dim_v) if dim is not None)


def has_hopper_kernels(head_dim: int) -> bool:
    if DEVICE.type != "cuda":
        return True
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return is_hopper and head_dim % 8 == 0 and head_dim <= 256


def make(documents, window_size=MASKS["causal"], name="home") -> TaskList:
    return task_list(documents, window_size, name, DEVICE)


def check_all_modes(tasks: TaskList, inputs: Inputs, scale: float, truth=None) -> None:
    truth = truth or reference(tasks, inputs, scale)
    for deterministic in MODES:
        truth.check(attend(tasks, inputs, scale, deterministic))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", WIDTHS, ids=widths)
@pytest.mark.parametrize("mask", MASKS)
def test_lengths(mask, heads, dtype):
    tasks = make([whole(length) for length in (*LENGTHS, 4097, 2)], MASKS[mask])
    check_all_modes(tasks, random_inputs(tasks, heads, dtype), heads.scale)


@pytest.mark.parametrize("heads_kv", [4, 8])
@pytest.mark.parametrize("name", ["home", "visiting"])
@pytest.mark.parametrize("heads", [*WIDTHS, ODD_WIDTH], ids=widths)
@pytest.mark.parametrize("mask", ["causal", "full", "window"])
def test_many_more_key_blocks_than_multiprocessors(mask, name, heads, heads_kv):
    """Each persistent block takes many items, of many and of few tiles, and reuses its memory."""
    heads = heads._replace(heads_kv=heads_kv)
    # At home and under the window, no query sees its keys from 128 to 255.
    sparse = Document(999, ((70, 71), (500, 700)))
    documents = [*(cut(length, SHARDS) for length in LENGTHS), sparse] * 10
    tasks = make(documents, MASKS[mask], name)
    check_all_modes(tasks, random_inputs(tasks, heads, torch.bfloat16), heads.scale)


@pytest.mark.parametrize("sign", SIGNS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads_q, heads_kv", [(1, 1), (4, 4), (8, 2), (8, 1), (6, 2)])
@pytest.mark.parametrize("head_dim", [64, 128, 96, 256, 40, 192, 136])
def test_heads(heads_q, heads_kv, head_dim, dtype, sign):
    heads = Heads(heads_q, heads_kv, head_dim)
    for mask in ("causal", "full"):
        tasks = make([whole(length) for length in LENGTHS], MASKS[mask])
        check_all_modes(tasks, random_inputs(tasks, heads, dtype), sign * heads.scale)


@pytest.mark.parametrize("sign", SIGNS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["home", "visiting"])
@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(192, 128), (128, 192), (128, 64), (64, 128), (256, 40), (8, 256)]
)
def test_another_head_dim_of_v(head_dim, head_dim_v, name, dtype, sign):
    heads = GQA._replace(head_dim=head_dim, head_dim_v=head_dim_v)
    for mask in ("causal", "full", "window"):
        documents = [*map(whole, LENGTHS), cut(1700, SHARDS), Document(999, ((70, 71), (500, 700)))]
        tasks = make(documents, MASKS[mask], name)
        check_all_modes(tasks, random_inputs(tasks, heads, dtype), sign * heads.scale)


def test_a_scale_of_zero():
    """With this scale, each query takes the mean of the values that it sees."""
    tasks = make([whole(length) for length in LENGTHS])
    check_all_modes(tasks, random_inputs(tasks, GQA, torch.bfloat16), 0.0)


def test_widths_that_are_refused():
    documents = distca.Documents([0, 8])
    for dims, message in (((64, 36), "v's head_dim is 36;"), ((64, 264), "v's head_dim is 264;")):
        q, v = (torch.ones(8, 2, dim, device=DEVICE, dtype=torch.bfloat16) for dim in dims)
        with pytest.raises(ValueError, match=f"{message} .* takes multiples of 8 up to 256"):
            distca.core_attention(q, q, v, documents)


@pytest.mark.parametrize("sign", SIGNS, ids=str)
@pytest.mark.parametrize("window_size", TWO_SIDED)
@pytest.mark.parametrize("name", ["home", "visiting"])
@pytest.mark.parametrize("heads", WIDTHS, ids=widths)
def test_two_sided_windows(heads, name, window_size, sign):
    documents = [*map(whole, LENGTHS), cut(1700, SHARDS), Document(999, ((70, 71), (500, 700)))]
    tasks = make(documents, window_size, name)
    check_all_modes(tasks, random_inputs(tasks, heads, torch.bfloat16), sign * heads.scale)


@pytest.mark.parametrize("heads", [*WIDTHS, ODD_WIDTH, *ODD_GROUPS], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_any_sharding_equals_the_whole(mask, heads):
    lengths = [3, 1700, 65, 641, 1]
    tasks = make([whole(length) for length in lengths], MASKS[mask])
    inputs = random_inputs(tasks, heads, torch.bfloat16)
    truth = reference(tasks, inputs, heads.scale)
    for sizes in (SHARDS, SHARDS[::-1], [64], [1000], [7, 250]):
        documents = [cut(length, sizes) for length in lengths]
        for name in ("home", "visiting"):
            check_all_modes(make(documents, MASKS[mask], name), inputs, heads.scale, truth)


def some_shards() -> list[Document]:
    """Return documents whose queries this rank serves in whole, in part or not at all."""
    return [
        whole(129),
        Document(300, ((7, 8), (100, 200))),
        Document(77, ()),
        Document(1500, ((0, 1), (64, 128), (300, 400), (401, 529), (1200, 1500))),
        whole(0),
        Document(257, ((256, 257),)),
        Document(200, ((0, 64),)),
        whole(65),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["home", "visiting"])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_of_other_servers_are_left_alone(mask, name, dtype):
    tasks = make(some_shards(), MASKS[mask], name)
    check_all_modes(tasks, random_inputs(tasks, GQA, dtype), GQA.scale)


@pytest.mark.parametrize(
    "heads",
    [Heads(8, 1, 128), Heads(8, 2, 64), Heads(2, 2, 128), Heads(4, 1, 192), Heads(2, 2, 256)],
    ids=str,
)
def test_few_rows_over_a_long_prefix(heads):
    documents = [whole(3), Document(65537, ((65536, 65537),)), Document(65536, ((65400, 65500),))]
    for name in ("home", "visiting"):
        tasks = make(documents, name=name)
        check_all_modes(tasks, random_inputs(tasks, heads, torch.bfloat16), heads.scale)


@pytest.mark.parametrize("name", ["home", "visiting"])
@pytest.mark.parametrize(
    "documents", [[], [whole(0)], [Document(70, ())], [whole(0), whole(1), whole(0)]]
)
def test_empty_and_nearly_empty_lists(documents, name):
    tasks = make(documents, name=name)
    check_all_modes(tasks, random_inputs(tasks, GQA, torch.bfloat16), GQA.scale)


def test_softmax_scales():
    tasks = make([whole(length) for length in LENGTHS])
    inputs = random_inputs(tasks, GQA, torch.bfloat16)
    for scale in (1e-3, 0.05, 1.0):
        check_all_modes(tasks, inputs, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", WIDTHS, ids=widths)
def test_extreme_logits(heads, dtype):
    """With scores up to thousands, softmax is nearly an argmax."""
    for name in ("home", "visiting"):
        tasks = make([*map(whole, LENGTHS), cut(1000, SHARDS)], name=name)
        inputs = random_inputs(tasks, heads, dtype)
        inputs = inputs._replace(q=20 * inputs.q, k=20 * inputs.k)
        truth = reference(tasks, inputs, heads.scale, softmax_dtype=torch.float32)
        check_all_modes(tasks, inputs, heads.scale, truth)


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("heads", WIDTHS, ids=widths)
def test_scores_that_lse_cannot_tell_apart(heads, deterministic):
    """Recomputed probabilities are at most 1.

    Scores go up to 1e8, where rounding changes a probability by e^8. So no gradient of a value may
    exceed the sum of grad_out over all queries.
    """
    if not has_hopper_kernels(heads.head_dim):
        pytest.skip("PyTorch's kernels round differently")
    tasks = make([*map(whole, LENGTHS), cut(1000, SHARDS)])
    inputs = random_inputs(tasks, heads, torch.bfloat16)
    inputs = inputs._replace(q=3e3 * inputs.q, k=3e3 * inputs.k)
    results = attend(tasks, inputs, heads.scale, deterministic)
    limit = inputs.grad_out.float().abs().sum((0, 1)).max().item()
    assert all(tensor.isfinite().all() for tensor in results)
    assert results.dv.abs().max().item() <= limit


@pytest.mark.parametrize("heads", WIDTHS, ids=widths)
def test_rows_of_large_values(heads):
    tasks = make([whole(129), cut(1000, SHARDS), whole(1000)], name="visiting")
    inputs = random_inputs(tasks, heads, torch.bfloat16)
    inputs.v[700] *= 100
    inputs.grad_out[900] *= 1000
    check_all_modes(tasks, inputs, heads.scale)


@pytest.mark.parametrize("heads", WIDTHS, ids=widths)
def test_a_row_without_a_bound_changes_no_other(heads):
    """In deterministic mode, row 700's dq has no quantum: squares of its grad_out overflow."""
    if not has_hopper_kernels(heads.head_dim):
        pytest.skip("PyTorch's kernels add up dq in floats")
    tasks = make([whole(1000)])
    inputs = random_inputs(tasks, heads, torch.bfloat16)
    expected = attend(tasks, inputs, heads.scale, deterministic=True).dq
    inputs.grad_out[700] *= 1e20
    dq = attend(tasks, inputs, heads.scale, deterministic=True).dq
    others = torch.arange(1000, device=DEVICE) != 700
    assert dq[700].isnan().all()
    assert torch.equal(dq[others], expected[others])


def views(inputs: Inputs) -> dict[str, Inputs]:
    """Return the same values as slices of one fused projection, and with heads first."""
    q, k, v, grad_out = inputs
    rows = torch.cat([tensor.flatten(1) for tensor in (q, k, v)], dim=1)
    parts = rows.split([tensor[0].numel() for tensor in (q, k, v)], dim=1)
    split = [part.unflatten(1, of.shape[1:]) for part, of in zip(parts, (q, k, v), strict=True)]
    fused = Inputs(*split, grad_out)
    heads_first = Inputs(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs))
    assert not any(tensor.is_contiguous() for tensor in (*fused[:3], *heads_first))
    return {"fused": fused, "heads first": heads_first}


@pytest.mark.parametrize("heads", [*WIDTHS, ODD_WIDTH], ids=widths)
def test_strided_views(heads):
    tasks = make([whole(3), cut(700, SHARDS), whole(65)])
    inputs = random_inputs(tasks, heads, torch.bfloat16)
    packed = attend(tasks, inputs, heads.scale, deterministic=True)
    for layout, strided in views(inputs).items():
        results = attend(tasks, strided, heads.scale, deterministic=True)
        assert same_bits(results, packed) == [True] * 5, layout
        reference(tasks, inputs, heads.scale).check(attend(tasks, strided, heads.scale))


def test_expanded_gradients():
    tasks = make([whole(3), cut(700, SHARDS), whole(65)])
    inputs = random_inputs(tasks, GQA, torch.bfloat16)
    grad_out = inputs.grad_out
    for some in (grad_out[:1, :1, :1], grad_out[:1], grad_out[:, :1], grad_out[:, :, :1]):
        expanded = inputs._replace(grad_out=some.expand_as(grad_out))
        check_all_modes(tasks, expanded, GQA.scale)


def same_bits(results: Results, expected: Results) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(results, expected, strict=True)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("heads", [*WIDTHS, ODD_WIDTH], ids=widths)
@pytest.mark.parametrize("name", ["home", "visiting"])
@pytest.mark.parametrize("mask", ["causal", "full", "window"])
def test_values_of_neighbours_have_no_influence(mask, name, heads, value):
    documents = [whole(n) if n % 2 else cut(n, SHARDS) for n in (70, 129, 300, 77, 800, 63, 64)]
    tasks = make([*documents, Document(40, ()), whole(130)], MASKS[mask], name)
    clean = random_inputs(tasks, heads, torch.bfloat16)
    spoilt = Inputs(*(tensor.clone() for tensor in clean))
    untouched_q, untouched_k = untouched_rows(tasks)
    for tensor, untouched in zip(
        spoilt, (untouched_q, untouched_k, untouched_k, untouched_q), strict=True
    ):
        tensor[~untouched] = value

    truth = reference(tasks, clean, heads.scale)
    for deterministic in MODES:
        expected = attend(tasks, clean, heads.scale, deterministic)
        results = attend(tasks, spoilt, heads.scale, deterministic)
        assert not results.out.isfinite().all(), "the neighbours' rows are not spoilt"
        kept = (untouched_q,) * 3 + (untouched_k,) * 2
        exact = 5 if deterministic else 2  # out and lse always
        for result, wanted, rows in list(zip(results, expected, kept, strict=True))[:exact]:
            assert torch.equal(result[rows], wanted[rows])
        for result, wanted, rows in zip(results, expected, kept, strict=True):
            result[~rows] = wanted[~rows]
        truth.check(results)


def untouched_rows(tasks: TaskList) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the query and key rows of every other document. All other rows are neighbours."""
    rows = []
    for num_rows, of in (
        (tasks.num_q_rows, lambda part: part.q_rows),
        (tasks.num_k_rows, lambda part: part.k_rows),
    ):
        untouched = torch.zeros(num_rows, dtype=torch.bool, device=tasks.device)
        for part in tasks.served[1::2]:
            untouched[of(part)] = True
        rows.append(untouched)
    return rows[0], rows[1]


@pytest.mark.parametrize("heads", WIDTHS, ids=widths)
@pytest.mark.parametrize("sizes", [[10**6], SHARDS, SHARDS[::-1], [128]], ids=str)
def test_200_repeats_give_the_same_bits(sizes, heads):
    tasks = make([cut(length, sizes) for length in (3, 1000, 700, 129)], name="visiting")
    inputs = random_inputs(tasks, heads, torch.bfloat16)
    share = (tasks.layout, tasks.rows, heads.scale, tasks.name)
    first = attend(tasks, inputs, heads.scale, deterministic=True)
    q, k, v, grad_out = inputs
    differing = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    with deterministic_mode(True):
        for _ in range(200):
            out, lse = ops.attend(q, k, v, *share)
            grads = ops.attend_backward(grad_out, q, k, v, out, lse, *share)
            pairs = zip((out, lse, *grads), first, strict=True)
            differing += torch.stack([(result != wanted).sum() for result, wanted in pairs])
    assert differing.tolist() == [0] * 5


def test_the_option_equals_torchs_switch():
    torch.manual_seed(0)
    lengths = torch.tensor([0, 3, 1003, 1703, 1832])
    q, k, v = (
        torch.randn(1832, heads, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    )

    def gradients(option: bool, switch: bool) -> tuple[torch.Tensor, ...]:
        distca.configure(distca.Options(deterministic=option))
        with deterministic_mode(switch):
            out = distca.core_attention(q, k, v, distca.Documents(lengths))
            return torch.autograd.grad(out.float().square().sum(), (q, k, v))

    try:
        expected = gradients(option=False, switch=True)
        results = [gradients(option=True, switch=False) for _ in range(5)]
    finally:
        distca.configure(distca.Options())
    assert all(same_bits(result, expected) == [True] * 3 for result in results)


def test_forward_gives_the_same_bits_in_both_modes():
    tasks = make([cut(length, SHARDS) for length in LENGTHS], name="visiting")
    inputs = random_inputs(tasks, GQA, torch.bfloat16)
    fast, exact = (attend(tasks, inputs, GQA.scale, mode) for mode in MODES)
    assert same_bits(fast, exact)[:2] == [True, True]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only Hopper kernels start at any key")
@pytest.mark.parametrize("window_size", [(-1, 0), (-1, -1), (66_000, 0), (66_001, 700)], ids=str)
@pytest.mark.parametrize("heads", WIDTHS, ids=widths)
def test_items_of_many_keys_start_where_others_are(heads, window_size):
    """Later items wrap around their keys, except in deterministic mode.

    Two documents have more items than there are multiprocessors. A missing block of keys would be
    4 % of a row's result.
    """
    if not has_hopper_kernels(heads.head_dim):
        pytest.skip("only Hopper kernels start at any key")
    long = [Document(n, ((n - rows, n),)) for n, rows in ((75_001, 7_000), (80_000, 3_100))]
    tasks = make([whole(3), long[0], whole(500), long[1]], window_size, "visiting")
    q, k, v, _ = random_inputs(tasks, heads, torch.bfloat16)
    by_mode = []
    for deterministic in MODES:
        with deterministic_mode(deterministic):
            share = (tasks.layout, tasks.rows, heads.scale, tasks.name)
            by_mode.append([result.double() for result in ops.attend(q, k, v, *share)])
    (out, lse), (exact_out, exact_lse) = by_mode
    assert not torch.equal(lse, exact_lse)
    assert (lse - exact_lse).abs().max() < 1e-4
    assert ((out - exact_out).norm(dim=-1) / exact_out.norm(dim=-1)).max() < 0.01


@pytest.mark.parametrize("heads", WIDTHS, ids=widths)
@pytest.mark.parametrize("mask", ["causal", "full", "window"])
def test_order_of_documents_changes_no_bits(mask, heads):
    if not has_hopper_kernels(heads.head_dim):
        pytest.skip("ATen's order of summation depends on the other documents of a call")
    documents = [cut(length, SHARDS) for length in (1000, 3, 700, 129, 64)]
    order = [3, 0, 4, 2, 1]
    tasks = make(documents, MASKS[mask], "visiting")
    permuted = make([documents[i] for i in order], MASKS[mask], "visiting")
    inputs = random_inputs(tasks, heads, torch.bfloat16)
    rows = torch.cat([tasks.parts[i].q_rows for i in order])  # queries and keys have equal rows
    moved = Inputs(*(tensor[rows] for tensor in inputs))
    expected = attend(tasks, inputs, heads.scale, deterministic=True)
    results = attend(permuted, moved, heads.scale, deterministic=True)
    assert same_bits(results, Results(*(tensor[rows] for tensor in expected))) == [True] * 5


@pytest.mark.parametrize("heads", [*ODD_GROUPS, GQA._replace(head_dim=64), GQA], ids=str)
@pytest.mark.parametrize("mask", ["causal", "full", "window"])
def test_other_tasks_of_a_document_change_no_bits(mask, heads):
    if not has_hopper_kernels(heads.head_dim):
        pytest.skip("ATen's order of summation depends on the other tasks of a call")
    all_shards = cut(1500, [64, 30, 128, 100, 64])
    few_shards = Document(1500, all_shards.shards[1::3])
    tasks, fewer = (make([each, whole(70)], MASKS[mask]) for each in (all_shards, few_shards))
    inputs = random_inputs(tasks, heads, torch.bfloat16)
    results, expected = (attend(each, inputs, heads.scale, True) for each in (tasks, fewer))
    rows = fewer.parts[0].q_rows
    assert torch.equal(results.out[rows], expected.out[rows])
    assert torch.equal(results.lse[rows], expected.lse[rows])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="streams are CUDA's")
@pytest.mark.parametrize("heads", WIDTHS, ids=widths)
def test_two_streams_at_once(heads):
    lists = [make([cut(1500, SHARDS), whole(65)], name="visiting"), make([whole(900), whole(701)])]
    inputs = [random_inputs(tasks, heads, torch.bfloat16, seed) for seed, tasks in enumerate(lists)]
    expected = [
        attend(tasks, held, heads.scale, deterministic=True)
        for tasks, held in zip(lists, inputs, strict=True)
    ]
    streams = [torch.cuda.Stream() for _ in lists]
    torch.cuda.synchronize()
    all_results = []
    with deterministic_mode(True):
        for _ in range(10):
            for i, (tasks, (q, k, v, grad_out)) in enumerate(zip(lists, inputs, strict=True)):
                share = (tasks.layout, tasks.rows, heads.scale, tasks.name)
                with torch.cuda.stream(streams[i]):
                    out, lse = ops.attend(q, k, v, *share)
                    grads = ops.attend_backward(grad_out, q, k, v, out, lse, *share)
                all_results.append((i, Results(out, lse, *grads)))
    torch.cuda.synchronize()
    assert all(same_bits(results, expected[i]) == [True] * 5 for i, results in all_results)


@pytest.mark.whole_gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs tens of GB")
def test_rows_past_the_2_to_the_31st_element():
    """Of 524288 rows of 32 x 128, only those of the last document have tasks; the rest is NaN."""
    heads = Heads(32, 8, 128)
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free device memory")
    num_rows, length = 2**31 // (32 * 128), 1000
    large = make([Document(num_rows - 3, ()), cut(length, SHARDS)])
    small = make([cut(length, SHARDS)])
    inputs = random_inputs(small, heads, torch.bfloat16)
    padded = Inputs(*(pad_before(tensor, num_rows - 3) for tensor in inputs))
    truth = reference(small, inputs, heads.scale)
    for deterministic in MODES:
        results = attend(large, padded, heads.scale, deterministic)
        assert not any(tensor[: num_rows - 3].any() for tensor in results[3:])
        truth.check(Results(*(tensor[num_rows - 3 :] for tensor in results)))


def pad_before(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    padded = tensor.new_full((num_rows + tensor.shape[0], *tensor.shape[1:]), float("nan"))
    padded[num_rows:] = tensor
    return padded


def test_an_extra_key_is_noticed():
    """test_task_lists.py plants other errors on the CPU."""
    documents = [whole(65), cut(1000, SHARDS)]
    right, wrong = make(documents, (200, 0)), make(documents, (201, 0))
    inputs = random_inputs(right, GQA, torch.bfloat16)
    with pytest.raises(Outside):
        reference(right, inputs, GQA.scale).check(attend(wrong, inputs, GQA.scale))
