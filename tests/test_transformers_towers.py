"""Vision towers under attn_implementation="distca": their bidirectional attention stays on its
rank, in training too, where ranks may have different numbers of images."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, and this environment has none")

import packed_models as pm  # noqa: E402
import transformers  # noqa: E402
from packed_models import Packed  # noqa: E402

from distca.integrations import transformers as integration  # noqa: E402

TOLERANCE = 1e-5
IMAGE = pm.VOCAB_SIZE - 1  # the token that stands for a patch of an image
NUM_PATCHES = 4
LENGTHS = [[61, 9, 180], [7, 30]]  # by rank
NUM_IMAGES = [[1, 0, 2], [0, 0]]  # in each of these documents


def model_of_images() -> transformers.PreTrainedModel:
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        initializer_range=0.2,
    )
    text = transformers.LlamaConfig(**{**pm.SIZES, "attn_implementation": None})
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        attn_implementation="distca",
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).train()


def batch_of(rank: int) -> tuple[Packed, torch.Tensor]:
    """Return documents that begin with their images, and the pixels of all images."""
    packed = Packed.of(LENGTHS[rank], seed=rank)
    packed.ids.clamp_(max=IMAGE - 1)
    begin = 0
    for length, num_images in zip(LENGTHS[rank], NUM_IMAGES[rank], strict=True):
        packed.ids[:, begin : begin + num_images * NUM_PATCHES] = IMAGE
        begin += length
    generator = torch.Generator().manual_seed(rank)
    return packed, torch.randn(sum(NUM_IMAGES[rank]), 3, 8, 8, generator=generator)


def train(model, calls: list[tuple[dict, torch.Tensor]]) -> tuple[torch.Tensor, dict]:
    model.zero_grad()
    loss = torch.zeros(())
    for keywords, labels in calls:
        logits = model(**keywords).logits.flatten(0, 1)
        labels = labels.flatten()
        loss = loss + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), {name: each.grad.clone() for name, each in named if each.grad is not None}


def worst_error(got: tuple[torch.Tensor, dict], truth: tuple[torch.Tensor, dict]) -> float:
    """Return the largest error of the loss and of all gradients, some of which are 0."""
    of_all = sum(each.norm() ** 2 for each in truth[1].values()).sqrt()
    errors = [
        (got[1][name] - each).norm() / (each.norm() + 1e-3 * of_all)
        for name, each in truth[1].items()
    ]
    return max(*errors, (got[0] - truth[0]).abs() / truth[0].abs()).item()


def training_error(rank: int, world_size: int, use_checkpoint: bool) -> tuple[float, int]:
    """Return the worst error of a step, and the bytes that its plan moves."""
    model, (packed, pixels) = model_of_images(), batch_of(rank)
    eager = pm.with_attention(model, "eager")
    if use_checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    images = pixels.split(NUM_IMAGES[rank])
    parts = (each.split(packed.lengths, dim=1) for each in (packed.ids, packed.labels))
    by_document = [
        ({"input_ids": ids, "pixel_values": own if len(own) else None}, labels)
        for ids, labels, own in zip(*parts, images, strict=True)
    ]
    keywords = {**packed.keywords(), "pixel_values": pixels if len(pixels) else None}
    got, truth = train(model, [(keywords, packed.labels)]), train(eager, by_document)
    assert got[1].keys() == truth[1].keys()
    has_tower = any("vision_tower" in name for name in got[1])
    assert has_tower == (rank == 0), "images are on rank 0 only"
    return worst_error(got, truth), sum(integration.latest_plan().report().bytes_out)


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_images_on_one_rank_only(ranks, use_checkpoint):
    for error, bytes_out in ranks(2).run(training_error, use_checkpoint, timeout_s=60):
        assert error <= TOLERANCE and bytes_out > 0


def test_the_comparison_notices_images_in_another_order():
    model, (packed, pixels) = model_of_images(), batch_of(0)
    keywords = {**packed.keywords(), "pixel_values": pixels}
    truth = train(model, [(keywords, packed.labels)])
    got = train(model, [({**keywords, "pixel_values": pixels.flip(0)}, packed.labels)])
    assert worst_error(got, truth) > 100 * TOLERANCE
