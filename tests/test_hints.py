"""What distca does not do, because a call or an option is missing, it says once."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_plain_code import BY_END, Derived, Model, tokens_of
from torch.testing._internal.distributed.fake_pg import FakeStore

import distca
from distca import scope
from distca.integrations.boundaries import read_boundaries
from distca.planning.plan import CAUSAL
from distca.ranks import session as sessions
from distca.ranks.hints import hint
from distca.watching.monitor import Monitor


@pytest.fixture
def hints(caplog):
    """Return hints(), the texts since the last call."""
    hint.cache_clear()

    def new() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return texts

    return new


@pytest.fixture
def group():
    """Return group(backend, num_ranks), which makes this process its rank 0."""

    def join(backend: str, num_ranks: int) -> None:
        store = FakeStore() if backend == "fake" else dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=num_ranks)

    yield join
    distca.close()
    dist.destroy_process_group()


def attend_twice() -> None:
    q = torch.ones(8, 2, 4)
    for _ in range(2):
        distca.core_attention(q, q, q, distca.Documents([0, 3, 8]))


def test_documents_without_a_plan(hints, group):
    attend_twice()
    assert hints() == [], "one process"
    group("fake", 2)
    with torch.no_grad():
        attend_twice()
    assert hints() == [], "evaluation"
    attend_twice()
    (text,) = hints()
    assert "call distca.plan(documents) once a step" in text


def test_attention_outside_documents_under_the_launcher(hints, monkeypatch):
    q = torch.ones(1, 2, 8, 4)
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
    monkeypatch.setattr(scope, "_is_patched", False)
    distca.scaled_dot_product_attention(q, q, q)
    assert hints() == [], "the script's own choice"
    scope.patch_torch()
    with distca.documents(distca.Documents([0, 8])):
        F.scaled_dot_product_attention(q, q, q)
    assert hints() == []
    for _ in range(2):
        F.scaled_dot_product_attention(q, q, q)
    (text,) = hints()
    assert "pass --document-end-id or" in text


@pytest.mark.parametrize("lengths, num_hints", [([9], 1), ([5, 4], 0)])
def test_an_end_id_that_never_occurs(hints, lengths, num_hints):
    ids = tokens_of(lengths)
    ids[0, -1] = BY_END.document_end_id + 1
    with Derived(BY_END):
        for _ in range(7):
            Model()(ids)
    texts = hints()
    assert len(texts) == num_hints
    assert all("token 3 (--document-end-id) is not in the first 5" in text for text in texts)


def test_batches_without_boundaries(hints, group):
    group("gloo", 1)
    session, layer = sessions.opened(), torch.nn.Identity()
    for _ in range(7):
        boundaries = read_boundaries({"position_ids": torch.arange(8)[None]}, 1, 8, "Layer")
        boundaries.of_pass(layer, session, CAUSAL, torch.device("cpu"))
    (text,) = hints()
    assert "the first 5 training batches hold one document a row" in text


def test_records_of_no_step(hints, tmp_path):
    Monitor(distca.Watching(run_dir=str(tmp_path))).close()
    (text,) = hints()
    assert "no step was planned" in text
