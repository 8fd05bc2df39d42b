"""The translation of an HTTP request into a run: the request of `fastdiff sample` with the same settings."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.kinds import Precision
from fastdiff.requests.defaults import BATCH_ON_CPU, COMMAND, SEED
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run
from fastdiff.serve.orders.encoding import Form
from fastdiff.serve.orders.limits import Limits
from fastdiff.serve.orders.uploads import Uploaded
from fastdiff.serve.wire.answers import Endpoint, Usage, picture_tokens
from fastdiff.serve.wire.fields import Edit, Fields

MOST_TOGETHER = COMMAND.batch_size or 1  # pictures of a request


class Offered(Protocol):
    """The models on offer, as far as HTTP needs them: `fastdiff.serve.drawing.offers.Offers`."""

    precision: Precision
    on_cpu: bool
    created: int  # when, in seconds since 1970

    @property
    def ids(self) -> list[str]:
        """The ids of the models, the default one first."""

    @property
    def catalogue(self) -> Catalogue:
        """The catalogue with the LoRAs on offer."""

    def card(self, name: str | None) -> ModelCard:
        """Return the card of a model, or of the default one. Raises ApiError."""

    def text_tokens(self, card: ModelCard, *texts: str | None) -> int:
        """Return how many tokens texts have."""


@dataclass(frozen=True)
class Order:
    """A run, and how its pictures are sent."""

    run: Run
    form: Form
    partial: int  # partial pictures of each picture
    endpoint: Endpoint
    identifier: str | None  # the safety identifier of the request
    text_tokens: int

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the pictures."""
        assert self.run.size is not None  # a model that plans trajectories reads no prompts
        return self.run.size

    def usage(self, pictures: int) -> Usage:
        """Return the usage of so many of the pictures."""
        start = self.run.cells[0].start
        given = 0 if start is None else picture_tokens(*reversed(start.picture.size))
        return Usage.of(self.text_tokens, given, pictures * picture_tokens(*self.size))


def order_of(fields: Fields, offers: Offered, limits: Limits, pictures: Uploaded | None = None) -> Order:
    """Return the order of a request. Raises ApiError and InputError, before any heavy work.

    pictures: of an edit.
    """
    card = offers.card(fields.model)
    run = Run.prepare(_request(fields, card, offers, pictures), card, COMMAND)
    run = replace(run, batch_size=BATCH_ON_CPU if offers.on_cpu else min(len(run.cells), limits.batch or MOST_TOGETHER))
    limits.check(run)
    return Order(
        run=run,
        form=Form.of(fields),
        partial=fields.partial_images or 0,
        endpoint="image_generation" if pictures is None else "image_edit",
        identifier=fields.identifier,
        text_tokens=offers.text_tokens(card, fields.prompt, fields.negative_prompt),
    )


def _request(fields: Fields, card: ModelCard, offers: Offered, pictures: Uploaded | None) -> Request:
    width, height = fields.sides
    own: dict[str, Any] = {}
    if pictures is not None:
        own = {"init_image": pictures.image, "mask": pictures.mask}
        own |= {"strength": fields.strength} if isinstance(fields, Edit) else {}
    return Request(
        model=card.name,
        precision=offers.precision,
        prompt=(fields.prompt,),
        negative_prompt=fields.negative_prompt,
        num_images=fields.n,
        num_inference_steps=fields.num_inference_steps,
        guidance_scale=fields.guidance_scale,
        seed=SEED if fields.seed is None else fields.seed,
        scheduler=fields.scheduler,
        lora=offers.catalogue.option_files.chosen_loras(fields.loras or (), card),
        width=width,
        height=height,
        **own,
    )
