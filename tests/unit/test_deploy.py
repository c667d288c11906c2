"""What deploy/ looks at exists: figures and labels of rules and panels, options, probes; every alert is explained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import click
import promql_parser
import pytest
import yaml

from replicad.cli.app import root
from tests.figures_page import PARTS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
FIGURES = {family.name: SCRAPED | set(family.labels) for family in chain(*PARTS.values())} | {
    "up": SCRAPED,
    "ALERTS": {"alertname", "alertstate", "severity"},
    "process_cpu_seconds_total": SCRAPED,
    "process_resident_memory_bytes": SCRAPED,
}
RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus/replicad.rules.yml").read_text())["groups"][0][
    "rules"
]


def selectors(expression: str) -> list[Any]:
    """The selectors of series in an expression of PromQL."""
    found: list[Any] = []

    def look(node: Any) -> Iterator[Any]:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        for name in ("lhs", "rhs", "expr", "vector_selector", "args"):
            inner = getattr(node, name, None)
            yield from (inner if isinstance(inner, list) else [] if inner is None else [inner])

    todo = [promql_parser.parse(expression)]
    while todo:
        todo += look(todo.pop())
    return found


def check(expression: str) -> None:
    named = selectors(expression)
    assert named, expression
    for selector in named:
        assert selector.name in FIGURES, f"{selector.name} is not exported: {expression}"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= FIGURES[selector.name], f"{selector.name} has no label {labels - FIGURES[selector.name]}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_looks_at_figures_that_exist_and_is_explained(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    told = {label for selector in selectors(rule["expr"]) for label in FIGURES[selector.name]}
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= told
    assert rule["labels"]["severity"] in {"page", "ticket"}
    page, _, place = rule["annotations"]["runbook"].partition("#")
    assert place in [found.lower() for found in re.findall(r"^## (.+)$", (ROOT / page).read_text(), re.MULTILINE)]


def test_every_explained_alert_exists() -> None:
    explained = re.findall(r"^## (.+)$", (ROOT / "docs/alerts.md").read_text(), re.MULTILINE)
    assert explained == [rule["alert"] for rule in RULES]


def test_every_panel_looks_at_figures_that_exist() -> None:
    panels = json.loads((DEPLOY / "grafana/replicad.json").read_text())["panels"]
    expressions = [target["expr"].replace('"$instance"', '".*"') for panel in panels for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        check(expression)


def test_a_check_finds_what_does_not_exist() -> None:
    for wrong in ("replicad_nothing > 0", 'sum(rate(replicad_ready{stream="s"}[1m]))'):
        with pytest.raises(AssertionError):
            check(wrong)


def commands() -> Iterator[tuple[str, list[str]]]:
    """The command lines of replicad in the files: where, and the words after `replicad`."""
    yield "compose", yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["replicad"]["command"]
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes/replicad.yaml").read_text()))
    yield "kubernetes", deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    [unit] = re.findall(
        r"^ExecStart=\S+/replicad (.+)$", (DEPLOY / "systemd/replicad.service").read_text(), re.MULTILINE
    )
    yield "systemd", unit.split()


@pytest.mark.parametrize(("where", "words"), list(commands()))
def test_the_daemon_takes_the_options_that_are_deployed(where: str, words: list[str]) -> None:
    command, *options = words
    found = root.get_command(click.Context(root), command)
    assert found is not None, where
    found.make_context(command, options)  # raises for an option that does not exist


def test_probes_ask_for_what_is_answered() -> None:
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes/replicad.yaml").read_text()))
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["path"] for probe in probes] == ["/livez", "/livez", "/readyz"]
    assert all(f"0.0.0.0:{ports[probe['port']]}" in container["args"] for probe in probes)
