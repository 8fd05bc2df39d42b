"""Orders: requests translated into runs of `fastdiff sample`, within the limits of the server."""
