"""fractions asks whether a number is one."""


class Decimal: ...
