"""The instructions of a kernel's PTX, and what lies on the paths between them.

A compiler moves what happens rarely to the end of the text, so its order says nothing of what comes before
what. Here an instruction has successors, and a question is whether one is reached from another past a third.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

_LABEL = re.compile(r"([$\w]+):")
_INSTRUCTION = re.compile(r"(@!?[%\w]+\s+)?([a-z][\w.:]*)\s*(.*)", flags=re.S)
ENTRY = 0
"""The instruction before the first one: where a kernel begins."""


@dataclass(frozen=True)
class Paths:
    """Instructions by number. `successors` are those that may follow one, by a branch or by the text."""

    operations: tuple[str, ...]
    """As they are written: "st.release.sys.global.b32". "@" comes before one that is predicated."""
    successors: tuple[Set[int], ...]

    @staticmethod
    def of(ptx: str) -> Paths:
        """Of the text of one kernel, which calls no function."""
        operations, targets, labels = ["entry"], [""], {}
        text = re.sub(r"//.*", "", ptx[ptx.index(".entry") :])
        for statement in re.split(r"[;{}\n]|(?<=:)\s", text[text.index("{") :]):
            words = statement.strip()
            if label := _LABEL.fullmatch(words):
                labels[label[1]] = len(operations)
            elif found := _INSTRUCTION.fullmatch(words):
                predicate, operation, operands = found.groups()
                assert not re.match(r"call|brx", operation), words
                operations.append("@" * bool(predicate) + operation)
                targets.append(operands.strip() if operation.startswith("bra") else "")
        successors = []
        for number, (operation, target) in enumerate(zip(operations, targets, strict=True)):
            goes_on = not re.match(r"bra\b|ret\b|exit\b|trap\b", operation)
            successors.append({number + 1} if goes_on else set())
            if target:
                successors[-1].add(labels[target])
        return Paths(tuple(operations), tuple(successors))

    def where(self, pattern: str) -> set[int]:
        """The instructions whose operation is `pattern`, predicated or not."""
        return {n for n, name in enumerate(self.operations) if re.fullmatch(f"@?(?:{pattern})", name)}

    def behind(self, starts: Set[int], without: Set[int] = frozenset()) -> set[int]:
        """What some path from one of `starts` reaches on which none of `without` is."""
        found: set[int] = set()
        ahead = [following for start in starts for following in self.successors[start]]
        while ahead:
            number = ahead.pop()
            if number not in found and number not in without:
                found.add(number)
                ahead += self.successors[number]
        return found

    @cached_property
    def accesses(self) -> set[int]:
        """Everything that touches memory which others may touch: not a CTA's own, not the arguments."""
        own = self.where(r"\S+\.(param|shared|local)\b\S*")
        copies = self.where(r"cp\.async\.\w+\.shared\S*\.global\S*|cp\.async\.bulk\S*")
        return (self.where(r"(ld|st|atom|red|multimem|prefetch)\.\S+") - own) | copies

    @cached_property
    def ends(self) -> set[int]:
        return self.where("ret|exit|trap")
