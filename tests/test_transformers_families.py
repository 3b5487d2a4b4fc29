"""All families of causal language models of transformers on packed rows.

Each has the results of single documents with eager attention, or raises a ValueError with the
reason.
"""

import gc

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, and this environment has none")

import causal_families as families  # noqa: E402
import transformers  # noqa: E402
from causal_families import FAMILIES, NOT_BUILT  # noqa: E402

import distca  # noqa: E402
from distca.integrations import transformers as integration  # noqa: E402

TOLERANCE = 1e-4
LENGTHS = [[11, 1, 12], [3, 17, 4]]  # by rank
WALK_S = 400


def train(rank: int, name: str, lengths: list[int]) -> str:
    """Train `name` on these documents in one row, together with the other rank."""
    try:
        model = families.model_of(name, "distca").train()
    except ValueError as refusal:
        return f"refused: {refusal}"
    ids, labels = families.tokens(sum(lengths), seed=rank)
    one_by_one = zip(ids.split(lengths, dim=1), labels.split(lengths, dim=1), strict=True)
    eager = families.model_of(name, "eager").train()
    truth = families.step(eager, [({"input_ids": part}, target) for part, target in one_by_one])
    keywords = {"input_ids": ids}
    if len(lengths) > 1:
        keywords["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    try:
        packed_step = families.step(model, [(keywords, labels)])
    except ValueError as refusal:
        distca.close()
        distca.init()
        return f"refused: {refusal}"
    if sum(integration.latest_plan().report().bytes_out) == 0:
        return "no rows moved"
    error = families.largest_error(packed_step, truth)
    return "equal" if error <= TOLERANCE else f"wrong: {error:.1e}"


def is_causal(name: str) -> str:
    """Check that outputs of `name` in evaluation do not depend on later tokens."""
    ids, _ = families.tokens(24, seed=2)
    changed = ids.clone()
    changed[0, -1] = 3 + (changed[0, -1] + 7) % 50
    try:
        model = families.model_of(name, "distca").eval()
        with torch.no_grad():
            before, after = (model(input_ids=each).logits[0, :-1] for each in (ids, changed))
            truth = families.model_of(name, "eager").eval()(input_ids=ids).logits[0, :-1]
    except ValueError as refusal:
        return f"refused: {refusal}"
    leak = ((before - after).norm() / truth.norm()).item()
    error = ((before - truth).norm() / truth.norm()).item()
    is_right = max(leak, error) <= TOLERANCE
    return "equal" if is_right else f"wrong: {leak:.1e} from a later token, {error:.1e} of eager"


def walk(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, str]]:
    """Return, by family, the outcomes of packed rows, rows of one document and evaluation."""
    distca.close()
    # One rank computes for both, so that rows travel even for small models.
    distca.configure(distca.Options(server_speeds="0,1"))
    transformers.logging.set_verbosity_error()
    outcomes = {}
    for place, name in enumerate(names):
        gc.freeze()  # distca's search for models does not walk objects of earlier families
        outcomes[name] = {"packed": train(rank, name, LENGTHS[rank])}
        if outcomes[name]["packed"] != "equal":
            outcomes[name]["one document"] = train(rank, name, [24])
        if place % world_size == rank:
            outcomes[name]["evaluation"] = is_causal(name)
    distca.close()
    distca.configure(distca.Options())
    return outcomes


@pytest.fixture(scope="module")
def walked(ranks) -> dict[str, dict[str, str]]:
    """Train all families once on two ranks, because imports take most of the time."""
    names = [name for name in FAMILIES if name not in NOT_BUILT]
    first, second = ranks(2).run(walk, names, timeout_s=WALK_S)
    return {name: {**second[name], **first[name]} for name in names}


@pytest.mark.parametrize("name", FAMILIES)
def test_family(walked, name):
    if name in NOT_BUILT:
        pytest.skip(NOT_BUILT[name])
    for way in ("packed", "one document", "evaluation"):
        outcome = walked[name].get(way, "equal")
        assert outcome == "equal" or outcome.startswith("refused: "), (way, outcome)


def test_most_families_are_equal(walked):
    """Refusing every family would pass the other tests."""
    assert sum(outcomes["packed"] == "equal" for outcomes in walked.values()) >= 112
    assert sum(outcomes["evaluation"] == "equal" for outcomes in walked.values()) >= 148
