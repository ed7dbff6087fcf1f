"""stable-diffusion.cpp: its models as ggml's graphs, the buffers that these take, and the ways of running it."""
