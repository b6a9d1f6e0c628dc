"""A Vision Transformer of transformers on images of one's own, within a memory cap.

    python examples/vit.py images
    twinstream train examples/vit.py:build images -o run \\
        --tokens-per-step 64 --chunk-tokens 16 --steps 50 --device-mem 8MiB

`sample_inputs` says what forward takes of each sample. Another encoder is another `build`: DINOv2
(`Dinov2ForImageClassification`) takes the same, BERT (`BertForSequenceClassification`) `input_ids`
and `attention_mask`.

Source of the model: Dosovitskiy et al., An image is worth 16x16 words, arXiv:2010.11929.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

CLASSES, CHANNELS, SIDE, PATCH = 10, 3, 32, 8


def build() -> nn.Module:
    """The model, for `twinstream train examples/vit.py:build`."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256,
        image_size=SIDE, patch_size=PATCH, num_channels=CHANNELS, num_labels=CLASSES,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    model.sample_inputs = {"pixel_values": torch.zeros(CHANNELS, SIDE, SIDE)}
    return model


def write_samples(folder: Path, count: int = 512, seed: int = 0) -> None:
    """Random images, each brighter in the rows of its class."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, count)
    images = draw.standard_normal((count, CHANNELS, SIDE, SIDE)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        image[:, 3 * label : 3 * label + 3] += 1
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "pixel_values.npy", images)
    np.save(folder / "labels.npy", labels)


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
