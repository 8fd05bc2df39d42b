"""The files that a request names beside its model: embeddings and LoRAs."""
