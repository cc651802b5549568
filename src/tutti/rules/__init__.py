"""Factor rules, the allowed splits of every op, by family."""

from tutti.rules.rule import Rule, operands_of, results_of, shape
from tutti.rules.table import TABLE, add_rule, is_tensor_call, rule_of

__all__ = [
    "TABLE",
    "Rule",
    "add_rule",
    "is_tensor_call",
    "operands_of",
    "results_of",
    "rule_of",
    "shape",
]
