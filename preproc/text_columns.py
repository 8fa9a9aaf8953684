"""Record of the columns that were text when a fit read them: texts of `table.missing` are missing values in those."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from configs.messages import shown

TEXT_TYPES = ("varchar", "string")


@dataclass(frozen=True, slots=True)
class TextColumns:
    """Record of whether a column was text, by its name in lower case, since SQL ignores case."""

    sources: Mapping[str, Mapping[str, bool]]  # columns of every source, by its name
    # columns of the query's result; without a query, those of the only source
    result: Mapping[str, bool]

    @classmethod
    def of(cls, saved: Any, where: str) -> "TextColumns":
        """Return what `as_json` has made. Raises ValueError: it is something else; begins with `where`."""
        if not isinstance(saved, Mapping) or saved.keys() != {"sources", "result"}:
            raise ValueError(f"{where}: got {shown(saved)}, want sources and result")
        sources = saved["sources"]
        if not isinstance(sources, Mapping):
            raise ValueError(f"{where}.sources: got {shown(sources)}, want columns by source")
        for kinds in (*sources.values(), saved["result"]):
            is_right = isinstance(kinds, Mapping) and all(
                type(is_text) is bool and name == name.lower() for name, is_text in kinds.items()
            )
            if not is_right:
                raise ValueError(
                    f"{where}: got {shown(kinds)}, want true or false by column, in lower case"
                )
        return cls(sources, saved["result"])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def named(self, names: Collection[str]) -> "TextColumns":
        """Return them for new rows whose sources have these names: the only source of both may be called otherwise."""
        if len(names) != 1 or len(self.sources) != 1:
            return self
        return replace(self, sources=dict(zip(names, self.sources.values(), strict=True)))

    def of_rows(self, name: str) -> "TextColumns":
        """Return them for a source `name` of rows that take the place of the query's result."""
        return replace(self, sources={name: self.result})

    def over(self, later: "TextColumns") -> "TextColumns":
        """Return these columns, and those that only `later` has."""
        sources = {
            name: {**kinds, **self.sources.get(name, {})} for name, kinds in later.sources.items()
        }
        return TextColumns({**self.sources, **sources}, {**later.result, **self.result})
