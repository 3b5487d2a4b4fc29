"""Every family of causal language models of transformers gives the same results as document by
document with eager attention, or is refused by a ValueError that says why."""

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
    """Returns the outcome of training `name` on these documents in one row, with the other rank."""
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
        found = families.step(model, [(keywords, labels)])
    except ValueError as refusal:
        distca.close()
        distca.init()
        return f"refused: {refusal}"
    if sum(integration.latest_plan().report().bytes_out) == 0:
        return "no rows moved"
    error = families.largest_error(found, truth)
    return "equal" if error <= TOLERANCE else f"wrong: {error:.1e}"


def is_causal(name: str) -> str:
    """Returns whether outputs of `name` in evaluation depend on a later token."""
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
    """Returns outcomes of packed rows, rows of one document and evaluation, by family."""
    distca.close()
    # One rank computes for both: rows must travel, however small the model.
    distca.configure(distca.Options(server_speeds="0,1"))
    transformers.logging.set_verbosity_error()
    found = {}
    for place, name in enumerate(names):
        found[name] = {"packed": train(rank, name, LENGTHS[rank])}
        if found[name]["packed"] != "equal":
            found[name]["one document"] = train(rank, name, [24])
        if place % world_size == rank:
            found[name]["evaluation"] = is_causal(name)
    distca.close()
    distca.configure(distca.Options())
    return found


@pytest.fixture(scope="module")
def walked(ranks) -> dict[str, dict[str, str]]:
    """Walks all families once on two ranks: most of the time goes into imports."""
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
    assert sum(found["packed"] == "equal" for found in walked.values()) >= 96
    assert sum(found["evaluation"] == "equal" for found in walked.values()) >= 140
