"""The models on offer, and the LoRAs, embeddings, ControlNets and IP-Adapters that fit them."""

from fastdiff.hosting.catalogue.catalogue import Catalogue

__all__ = ["Catalogue"]
