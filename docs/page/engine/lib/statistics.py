"""The part of statistics that predictions use."""

import math


def fmean(values):
    values = list(values)
    return math.fsum(values) / len(values)
