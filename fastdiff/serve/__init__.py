"""An HTTP server with OpenAI's images API. Requests share the steps of the denoising loop."""
