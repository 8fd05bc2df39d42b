"""The most that one request may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    pictures: int = 32  # of one request
    steps: int = 1000
    side: int = 1024  # width and height, pixels
    batch_size: int = 32
    waiting: int = 32  # requests in the queue
    upload: int = 16 * 2**20  # bytes of one request's body
    kept: int = 2**30  # bytes of the pictures of each user or browser, where the page is served to others
    uploads: int = 256 * 2**20  # bytes of all uploads that lie on the disk
