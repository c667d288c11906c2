"""What deploy/ looks at exists: figures and labels of rules and panels, options, probes; every alert is explained."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from replicad.cli.serve import command as serve
from replicad.config.declaring import settings_of
from replicad.config.limits import Limits
from replicad.config.settings import DatabaseSettings, ServerSettings, read_settings
from replicad.daemon.figures import HISTOGRAM
from replicad.daemon.pools import DATABASE_SHARE, EXTRA_CLIENTS, SPARE, UNKNOWN_OPEN, most_connections
from tests.figures_page import PARTS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
FIGURES = {
    f"{family.name}{end}": SCRAPED | set(family.labels) | ({"le"} if end == "_bucket" else set())
    for family in chain(*PARTS.values())
    for end in (("_bucket", "_count", "_sum") if family.kind == HISTOGRAM else ("",))
} | {
    "up": SCRAPED,
    "ALERTS": {"alertname", "alertstate", "severity"},
    "process_cpu_seconds_total": SCRAPED,
    "process_resident_memory_bytes": SCRAPED,
}
RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus/replicad.rules.yml").read_text())["groups"][0][
    "rules"
]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze on this machine")
def test_the_unit_is_exposed_less_than_3_by_the_rules_of_systemd() -> None:
    unit = DEPLOY / "systemd/replicad.service"
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=29", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:]


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


@dataclass(frozen=True)
class Deployed:
    """A daemon as a file in deploy/ starts it: the words after `replicad`, the variables, and its seconds to stop."""

    where: str
    words: list[str]
    variables: dict[str, str]
    stops: float

    def settings(self) -> ServerSettings:
        """What the daemon makes of it, as `replicad serve` does."""
        command, *options = self.words
        assert command == "serve"
        context = serve.make_context(command, options)  # raises for an option that does not exist
        given = {name: value for name, value in context.params.items() if name not in ("config", "debug")}
        return read_settings(ServerSettings, given, environ=self.variables)  # raises for a value that is not valid


COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
DEPLOYMENT, SERVICE = yaml.safe_load_all((DEPLOY / "kubernetes/replicad.yaml").read_text())
CONTAINER: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]
UNIT = configparser.ConfigParser(strict=False, interpolation=None)
UNIT.optionxform = str  # type: ignore[assignment, method-assign]
UNIT.read(DEPLOY / "systemd/replicad.service")
PLACEHOLDERS = {"POSTGRES_PASSWORD": "p", "REPLICAD_TOKEN": "t" * 32}


def in_compose() -> Deployed:
    service = COMPOSE["replicad"]
    given = re.compile(r"[$][{](\w+):[?][}]")
    variables = {
        name: given.sub(lambda found: PLACEHOLDERS[found[1]], text) for name, text in service["environment"].items()
    }
    return Deployed("compose", service["command"], variables, float(service["stop_grace_period"].removesuffix("s")))


def in_kubernetes() -> Deployed:
    secret = {"database": "postgresql://u@db/app", "token": "t" * 32}
    variables = {one["name"]: secret[one["valueFrom"]["secretKeyRef"]["key"]] for one in CONTAINER["env"]}
    stops = DEPLOYMENT["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    return Deployed("kubernetes", CONTAINER["args"], variables, stops)


def in_systemd() -> Deployed:
    unit = UNIT["Service"]
    program, *words = unit["ExecStart"].split()
    assert program.endswith("/replicad")
    variables = {"REPLICAD_DATABASE": "postgresql://u@db/app"}
    return Deployed("systemd", words, variables, float(unit["TimeoutStopSec"]))


DEPLOYED = (in_compose(), in_kubernetes(), in_systemd())
VARIABLES = {made.variable for kind in (ServerSettings, DatabaseSettings, Limits) for made in settings_of(kind)}


@pytest.mark.parametrize("deployed", DEPLOYED, ids=lambda one: str(one.where))
def test_the_daemon_starts_as_it_is_deployed_and_has_the_time_to_stop(deployed: Deployed) -> None:
    settings = deployed.settings()
    settings.refuse_careless()
    assert deployed.variables.keys() <= VARIABLES
    assert settings.database.database
    assert settings.http is not None
    assert settings.limits.stop_grace < deployed.stops


def test_the_unit_has_files_for_all_connections_and_is_watched() -> None:
    unit = UNIT["Service"]
    limits = in_systemd().settings().limits
    own = UNKNOWN_OPEN + DATABASE_SHARE * most_connections(limits) + EXTRA_CLIENTS + limits.http_connections + SPARE
    assert int(unit["LimitNOFILE"]) >= limits.max_connections + own
    assert (unit["Type"], unit["KillMode"]) == ("notify", "mixed")


def test_the_unit_and_the_image_choose_the_allocator_that_gives_memory_back() -> None:
    assert UNIT["Service"]["Environment"] == "PYTHONMALLOC=malloc"
    assert re.search(r"^ENV .*\bPYTHONMALLOC=malloc\b", (ROOT / "Dockerfile").read_text(), re.MULTILINE)


def test_ports_and_probes_are_those_of_the_daemon() -> None:
    settings = in_kubernetes().settings()
    assert settings.http is not None
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"lines": settings.listen.port, "http": settings.http.port}
    served = {port["name"]: (port["port"], port["targetPort"]) for port in SERVICE["spec"]["ports"]}
    assert served == {name: (port, name) for name, port in ports.items()}
    template = DEPLOYMENT["spec"]["template"]
    assert SERVICE["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
    probes = [CONTAINER[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["path"] for probe in probes] == ["/livez", "/livez", "/readyz"]
    assert {ports[probe["port"]] for probe in probes} == {settings.http.port}
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"--uid {template['spec']['securityContext']['runAsUser']} " in dockerfile
    folders = set(re.findall(r"^VOLUME (\S+)$", dockerfile, re.MULTILINE))
    assert folders < {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}, "the root file system is read-only"
    assert f"EXPOSE {settings.listen.port}\n" in dockerfile


def test_prometheus_scrapes_the_daemon_of_compose_under_the_name_that_the_rules_have() -> None:
    settings = in_compose().settings()
    assert settings.http is not None
    published = {f"127.0.0.1:{port}:{port}" for port in (settings.listen.port, settings.http.port)}
    assert set(COMPOSE["replicad"]["ports"]) == published
    [job] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"replicad:{settings.http.port}"]}]
    assert [rule["expr"] for rule in RULES if "up{" in rule["expr"]] == [f'up{{job="{job["job_name"]}"}} == 0']
    token = job["authorization"]["credentials_file"]
    assert f'printf %s "$$REPLICAD_TOKEN" > {token} && ' in COMPOSE["prometheus"]["command"][0]
    for mounted in COMPOSE["prometheus"]["volumes"]:
        source = mounted.partition(":")[0]
        assert not source.startswith(".") or (DEPLOY / source).is_file(), source


CHART = DEPLOY / "helm/replicad"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
CHOSEN = {  # values of an installation with everything
    "replicas": 2, "tlsSecret": "tls", "accessSecret": {"name": "access"}, "serviceMonitor": {"enabled": True},
    "extraArgs": ["--server-name", "db1"], "podLabels": {"team": "data"}, "podAnnotations": {"a": "b"},
    "imagePullSecrets": [{"name": "pull"}], "nodeSelector": {"disk": "ssd"}, "tolerations": [{"operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}}, "service": {"annotations": {"a": "b"}},
}  # fmt: skip


def paths_of(tree: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield f"{before}{name}"
        if isinstance(value, dict):
            yield from paths_of(value, f"{before}{name}.")


def test_the_chart_uses_the_values_that_it_declares_and_all_of_them() -> None:
    used = set(re.findall(r"\.Values\.([\w.]+)", "".join(TEMPLATES.values())))
    declared = set(paths_of(VALUES))
    assert used <= declared
    whole = {"resources", "podLabels", "podAnnotations"}  # written as they are
    leaves = {one for one in declared if not any(other.startswith(f"{one}.") for other in declared)}
    assert {one for one in leaves if one not in used and one.split(".")[0] not in whole} == set()
    assert set(SCHEMA["properties"]) - {"global"} == set(VALUES), "a misspelt value is refused"
    for name, rule in SCHEMA["properties"].items():
        if "properties" in rule:
            assert set(rule["properties"]) == set(VALUES[name]), name
            assert rule["additionalProperties"] is False


def test_the_blocks_of_each_template_are_closed() -> None:
    for name, text in TEMPLATES.items():
        actions = re.findall(r"\{\{-?\s*(.*?)\s*-?\}\}", text)
        opened = sum(action.split()[0] in ("if", "with", "range", "define") for action in actions)
        assert opened == actions.count("end"), name
        assert text.count("{{") == len(actions), name


def test_the_chart_starts_the_daemon_of_this_version_with_options_that_exist() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    text = TEMPLATES["deployment.yaml"]
    given = [word.replace("{{ .Values.accessSecret.key }}", "access.toml") for word in re.findall(r"- (--\S.*)", text)]
    words = ["serve", *given]
    assert len(words) == 7
    variables = dict.fromkeys(re.findall(r"name: (REPLICAD_\w+)", text), "t" * 32)
    settings = Deployed("helm", words, {**variables, "REPLICAD_DATABASE": "postgresql://u@db/app"}, 0.0).settings()
    assert variables.keys() <= VARIABLES
    assert settings.http is not None
    assert settings.limits.stop_grace < VALUES["terminationGracePeriodSeconds"]
    ports = {int(port) for port in re.findall(r"containerPort: (\d+)", text)}
    assert ports == {settings.listen.port, settings.http.port}
    assert (VALUES["service"]["linesPort"], VALUES["service"]["httpPort"]) == (settings.listen.port, settings.http.port)
    security = CONTAINER["securityContext"]
    assert all(f"{name}: " in text for name in security), "as in deploy/kubernetes"
    assert f"runAsUser: {DEPLOYMENT['spec']['template']['spec']['securityContext']['runAsUser']}" in text


@pytest.mark.parametrize("values", [{}, CHOSEN], ids=["default", "everything"])
def test_helm_accepts_the_chart_and_renders_it(values: dict[str, Any], tmp_path: Path) -> None:
    if shutil.which("helm") is None:
        pytest.skip("there is no helm here")
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))

    def helm(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["helm", *words], capture_output=True, text=True, check=False, timeout=60)

    more = ["--values", str(tmp_path / "values.yaml")]
    done = helm("lint", "--strict", str(CHART), *more)
    assert done.returncode == 0, done.stdout
    done = helm("template", "db1", str(CHART), *more)
    assert done.returncode == 0, done.stderr
    made = {one["kind"]: one for one in yaml.safe_load_all(done.stdout) if one is not None}
    assert made.keys() == {"Deployment", "Service"} | ({"PodDisruptionBudget", "ServiceMonitor"} if values else set())
    template = made["Deployment"]["spec"]["template"]
    assert made["Service"]["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert helm("template", "db1", str(CHART), "--set", "replica=2").returncode != 0, "a misspelt value is refused"


CHECKERS = {
    "promtool": ["check", "rules", "prometheus/replicad.rules.yml"],
    "systemd-analyze": ["verify", "replicad.service"],
}


@pytest.mark.parametrize("program", CHECKERS)
def test_the_programs_that_will_read_the_files_accept_them(program: str, tmp_path: Path) -> None:
    """promtool is in Debian's prometheus. systemd-analyze wants the programs of a unit to be there."""
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")
    shutil.copytree(DEPLOY / "prometheus", tmp_path / "prometheus")
    unit = (DEPLOY / "systemd/replicad.service").read_text()
    (tmp_path / "replicad.service").write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", unit))
    done = subprocess.run(
        [program, *CHECKERS[program]], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "replicad.service:" not in told, "systemd-analyze warns of what it ignores"
