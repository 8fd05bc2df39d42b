"""The wire format: the fields of requests, the answers, and the errors. Imports no torch."""
