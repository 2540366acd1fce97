"""`loray check-config`: finds the faults of a server's yaml without starting anything."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from configs.adapters import AdaptersConfig
from configs.base import faults, similar
from configs.runtime import RuntimeConfig, with_runtime
from configs.serve import BasesConfig, ServeConfig
from configs.strict_yaml import load_yaml
from deployments.autoscaling import LoadPolicy
from deployments.commands.failing import fail
from deployments.commands.file_faults import engine_faults, missing_adapters, part
from sources.base import PACKAGE_ROOT

_POLICY = f"{LoadPolicy.__module__}:{LoadPolicy.__qualname__}"
_PACKAGE, _PREFIX = "deployments", re.compile(r"/|(/[^/{}]+)+")
_ONE, _SEVERAL = "deployments.app:build", "deployments.app:build_bases"


def check_config(path: Path) -> None:
    """Print every fault of the file; typer.Exit 1 if there is one."""
    config = read_config(find_config(path))
    found = [*config_faults(config), *pin_faults(config)]
    for fault in found:
        typer.echo(f"  - {fault}")
    if found:
        fail(f"{path} would be refused")
    typer.echo(f"{path}: no faults")


def find_config(given: Path) -> Path:
    """The file here, or else beside the installed package: `serve_config.yaml` is the demo's."""
    beside = (PACKAGE_ROOT / given, PACKAGE_ROOT / "configs" / "demo" / given)
    return next((path for path in (given, *beside) if path.is_file()), given)


def read_config(path: Path) -> dict[str, Any]:
    """The file's content; typer.Exit 2 if it is no yaml mapping."""
    try:
        config = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be read as a Serve config: {error}", status=2)
    if not isinstance(config, dict):
        fail(f"{path} is no Serve config: it holds no settings", status=2)
    return _inner_config(config) if config.get("kind") == "RayService" else config


def _inner_config(service: Mapping[str, Any]) -> dict[str, Any]:
    """The Serve config in a manifest of KubeRay's; typer.Exit 2 if there is none."""
    try:
        config = load_yaml(service["spec"]["serveConfigV2"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        fail(f"spec.serveConfigV2 of the RayService cannot be read: {error}", status=2)
    return config if isinstance(config, dict) else {}


def engines(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each base model of LoRay's applications, which must be free of faults."""
    for _, app in applications(config):
        yield from bases(app).values()


def config_faults(config: Mapping[str, Any]) -> list[str]:
    """Every fault of Serve's own keys, and of the args and deployments of LoRay's applications."""
    from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

    found, not_imported = list(_shape_faults(config)), ""
    try:
        ServeDeploySchema.model_validate(config)
    except ValueError as error:
        found += faults(error)
    except (ImportError, AttributeError) as error:
        # It imports policies and routers, and trips over deployments that are no mappings.
        not_imported = "" if found and isinstance(error, AttributeError) else str(error)
    http = config.get("http_options")
    port = http.get("port") if isinstance(http, dict) else None
    if isinstance(port, int) and not 0 < port < 65536:
        found.append(f"http_options.port: {port} is no port")
    # Serve ignores keys that it does not know.
    found += _unknown("", config, ServeDeploySchema.model_fields)
    found += _unknown_inside("", config)
    for where, app in applications(config):
        found += _unknown(f"{where}.", app, ServeApplicationSchema.model_fields)
        for one in _deployments(app):
            inner = f"{where}.deployments.{one.get('name')}."
            found += _unknown(inner, one, DeploymentSchema.model_fields)
            found += _unknown_inside(inner, one)
            found += [f"{inner}autoscaling_config: {fault}" for fault in _scaling_faults(one)]
        found += [f"{where}: {fault}" for fault in _app_faults(app)]
    if not_imported and not any(not_imported in fault for fault in found):
        found.append(f"it names what cannot be imported: {not_imported}")
    return list(dict.fromkeys(found))


def pin_faults(config: Mapping[str, Any]) -> list[str]:
    """Pins, names and catalogues that are missing here; a server starts without them."""
    found = []
    for where, app in applications(config):
        for driver, arguments in bases(app).items():
            adapters = part(arguments, AdaptersConfig, "adapters")
            if adapters is None:
                continue
            location = None if adapters.catalogue is None else adapters.catalogue.location
            if location and not location.startswith("s3://") and not Path(location).exists():
                fault = f"{location} is neither a folder nor a file"
                found.append(f"{where}: args.engine.adapters.catalogue.location: {fault}")
            user = _user_config(app, driver)
            pins, names = user.get("pinned_adapters"), user.get("names")
            wanted = {
                "pinned_adapters": pins if isinstance(pins, list) else (),
                "names": names.values() if isinstance(names, dict) else (),
            }
            for key, texts in wanted.items():
                for fault in missing_adapters(adapters, texts):
                    found.append(f"{where}: {driver}.user_config.{key}: {fault}")
    return found


def _shape_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """What Serve's schema takes, and a start does not."""
    if config.get("proxy_location") == "Disabled":
        yield "proxy_location: Disabled means no HTTP, by which LoRay is called: EveryNode"
    apps = config.get("applications")
    if not isinstance(apps, list):
        return  # Serve's schema says so.
    if not any(applications(config)):
        yield f"applications: none has LoRay's import_path, {_ONE} or {_SEVERAL}"
    for number, app in enumerate(app for app in apps if isinstance(app, dict)):
        where = f"applications.{app.get('name', number)}"
        path, prefix = app.get("import_path"), app.get("route_prefix", "/")
        if str(path).startswith(_PACKAGE) and path not in (_ONE, _SEVERAL):
            yield f"{where}.import_path: {path} is not {_ONE} and not {_SEVERAL}"
        if prefix is None or (isinstance(prefix, str) and not _PREFIX.fullmatch(prefix)):
            yield f"{where}.route_prefix: {prefix or 'null'} must be / or begin with /, not end so"
        given = app.get("deployments")
        for one in given if isinstance(given, list) else ():
            if not isinstance(one, dict):
                yield f"{where}.deployments: {one!r} must be a mapping: {{name: {one}}}"
        names = [one.get("name") for one in _deployments(app)]
        for name in sorted({str(name) for name in names if names.count(name) > 1}):
            yield f"{where}.deployments: {name} is there twice"


def _unknown(where: str, given: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    return [
        f"{where}{key}: there is no such key{similar(str(key), known)}"
        for key in given
        if key not in known
    ]


def _unknown_inside(where: str, given: Mapping[str, Any]) -> Iterator[str]:
    """The unknown keys in Serve's settings that are mappings."""
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import HTTPOptionsSchema, LoggingConfig, RayActorOptionsSchema

    schemas = {
        "autoscaling_config": AutoscalingConfig,
        "http_options": HTTPOptionsSchema,
        "logging_config": LoggingConfig,
        "ray_actor_options": RayActorOptionsSchema,
    }
    for name, schema in schemas.items():
        if isinstance(part := given.get(name), dict):
            yield from _unknown(f"{where}{name}.", part, schema.model_fields)


def _scaling_faults(deployment: Mapping[str, Any]) -> list[str]:
    """Faults of a deployment's autoscaling, which Serve looks at only when it deploys."""
    from ray.serve.config import AutoscalingConfig

    given = deployment.get("autoscaling_config")
    if not isinstance(given, dict):
        return []
    try:
        AutoscalingConfig.model_validate(given)
        policy = given.get("policy") or {}
        if policy.get("policy_function") == _POLICY:
            LoadPolicy(**policy.get("policy_kwargs") or {})
    except ValueError as error:
        return faults(error)
    except (ImportError, AttributeError, TypeError) as error:
        return [f"policy: {error}"]
    return []


def applications(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """LoRay's own applications, each with its path in the yaml."""
    apps = config.get("applications")
    for number, app in enumerate(apps if isinstance(apps, list) else ()):
        if isinstance(app, dict) and app.get("import_path") in (_ONE, _SEVERAL):
            yield f"applications.{app.get('name', number)}", app


def _app_faults(app: Mapping[str, Any]) -> Iterator[str]:
    kind = BasesConfig if app["import_path"] == _SEVERAL else ServeConfig
    arguments = app.get("args") or {}
    if not isinstance(arguments, dict):
        return  # Serve's schema says so.
    try:
        kind.model_validate(arguments)
    except ValueError as error:
        yield from (f"args.{fault}" for fault in faults(error, kind))
    drivers = bases(app)
    for each in drivers.values():
        yield from (f"args.{fault}" for fault in engine_faults(each))
    known = [*drivers, *fronts(app)]
    for one in _deployments(app):
        if one.get("name") not in known:
            yield f"deployments: there is no {one.get('name')!r}, only {' and '.join(known)}"
        elif one["name"] not in drivers and one.get("user_config"):
            yield f"deployments.{one['name']}: user_config belongs to the Driver"
    for driver, arguments in drivers.items():
        yield from _user_faults(driver, _user_config(app, driver), arguments)


def _user_faults(driver: str, given: Mapping[str, Any], arguments: Any) -> Iterator[str]:
    """Faults of a driver's user_config, by itself or for this engine."""
    try:
        runtime = RuntimeConfig.model_validate(given)
    except ValueError as error:
        yield from (f"{driver}.user_config.{fault}" for fault in faults(error, RuntimeConfig))
        return
    with suppress(ValueError):  # The engine's own faults are in the list already.
        engine = ServeConfig.model_validate(arguments).engine
        try:
            with_runtime(engine, runtime)
        except ValueError as error:
            yield from (f"{driver}.user_config.{fault}" for fault in faults(error))


def fronts(app: Mapping[str, Any]) -> list[str]:
    """The names of the deployments that are no driver."""
    batches = (app.get("args") or {}).get("batches")
    stored = isinstance(batches, dict) and batches.get("storage")
    return ["Ingress", "Batches"] if stored else ["Ingress"]


def bases(app: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of each base model, by the name of its deployment."""
    arguments = app.get("args") or {}
    if app["import_path"] == _ONE:
        return {"Driver": arguments}
    models = arguments.get("models") if isinstance(arguments, dict) else None
    return {f"Driver-{name}": each for name, each in (models or {}).items()}


def _deployments(app: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = app.get("deployments")
    return [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []


def _user_config(app: Mapping[str, Any], driver: str) -> dict[str, Any]:
    """A driver's user_config; Serve's schema checks its type."""
    for one in _deployments(app):
        if one.get("name") == driver and isinstance(one.get("user_config"), dict):
            found: dict[str, Any] = one["user_config"]
            return found
    return {}
