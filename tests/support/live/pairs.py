"""Pairs of equal tiny pipelines: one of diffusers, and one that runs on fastdiff."""

import torch

import fastdiff
from tests.support.live.loras import random_lora
from tests.support.text_pipelines import text_pipeline


class Pair:
    """Two equal pipelines. One of them runs on fastdiff."""

    def __init__(self, kind, *, accelerated=True):
        self.plain, self.fast = text_pipeline(kind), text_pipeline(kind)
        self.loras = {"first": random_lora(self.plain.unet, 1), "second": random_lora(self.plain.unet, 2, rank=3)}
        if accelerated:
            fastdiff.accelerate(self.fast)

    def both(self, change):
        for pipe in (self.plain, self.fast):
            change(pipe)

    def load(self, *names):
        for name in names:
            self.both(lambda pipe, name=name: pipe.load_lora_weights(dict(self.loras[name]), adapter_name=name))

    def hotswap(self, state):
        """Give the first adapter other values. peft may keep the tensors that it gets."""
        given = {"adapter_name": "first", "hotswap": True}
        self.both(lambda pipe: pipe.load_lora_weights({name: each.clone() for name, each in state.items()}, **given))

    def check(self, **options):
        """Compare the pipelines' latents, and return them."""
        expected, found = draw(self.plain, **options), draw(self.fast, **options)
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        return found

    @property
    def ours(self):
        current = self.fast.unet.forward.__self__._current
        return None if current is None else current[0]


def draw(pipe, **options):
    given = {"prompt": "a photo of the cat", "num_inference_steps": 2, "output_type": "latent"}
    return pipe(**given | options, generator=torch.Generator().manual_seed(3)).images


def away(latents, others):
    return (latents - others).abs().max() > 1e-2
