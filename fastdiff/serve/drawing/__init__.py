"""The drawers of a server, which draw the jobs of HTTP requests: in the server's process, or in worker processes."""
