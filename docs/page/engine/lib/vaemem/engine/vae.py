"""The page makes no VAE of our own (engine.c): plans depend on the machine, and 32 bits cannot address large ones."""


class VAE: ...
