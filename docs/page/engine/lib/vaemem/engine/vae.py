"""A VAE of ours in the page: only its plan, for eight threads and the plain C kernels."""

THREADS = 8


class VAE:
    def __init__(self, model):
        self.model = model

    def estimate(self, op, height, width, batch):
        return Run(self.model.plan(op, height, width, batch, threads=THREADS))


class Run:
    def __init__(self, plan):
        self.peak_bytes, self.reserved_bytes = sum(plan["peak"].values()), plan["reserved"]
