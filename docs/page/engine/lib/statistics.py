"""The parts of statistics that predictions use."""

import math


def fmean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def median(values):
    values = sorted(values)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
