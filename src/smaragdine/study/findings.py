"""All findings that results allow: each claim of the paper beside the number here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smaragdine.study import claims, claims_cases
from smaragdine.study.findings_albert import albert_findings
from smaragdine.study.findings_bert import bert_findings
from smaragdine.study.findings_variants import variant_findings
from smaragdine.study.results import Result
from smaragdine.study.verdicts import Claim, Finding, Verdict
from smaragdine.study.work import groups

__all__ = ["Claim", "Finding", "Verdict", "all_claims", "findings"]


def findings(results: Sequence[Result], out: Path | None = None) -> list[Finding]:
    """By study; in each by framework and precision. `out`: the study's folder, which holds the overhead."""
    # It takes `Finding` from here.
    from smaragdine.study.precision import precision_findings

    by_group = groups(results)
    return [
        *(finding for group in by_group for finding in bert_findings(group)),
        *(finding for group in by_group for finding in variant_findings(group)),
        *(finding for group in by_group for finding in albert_findings(group)),
        *precision_findings(results, out),
    ]


def all_claims() -> list[Claim]:
    """The table of what is compared and how it is judged, for the docs."""
    from smaragdine.study import precision

    return [*claims.PAPER_CLAIMS, *claims_cases.CASE_CLAIMS, *precision.PRECISION_CLAIMS]
