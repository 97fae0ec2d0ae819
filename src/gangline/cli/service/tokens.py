"""`gangline tokens`, `tenants` and `usage`: who may call a server, how much he may use, and how much he has used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, notes, print_json, run
from gangline.domain.errors import InvalidRequest
from gangline.domain.tenancy import DEFAULT_TENANT, QUOTAS, Role, UsageBy

if TYPE_CHECKING:
    from gangline.domain.tenancy import NewToken, TenantView, TokenView, UsageRow
    from gangline.wire.client.server import ServerClient

tokens = typer.Typer(no_args_is_help=True, help="Create, list, rotate and revoke tokens with a role and a tenant.")

_DAY_S = 86_400.0
TokenArgument = Annotated[str, typer.Argument(metavar="TOKEN_ID", help="As in `gangline tokens list`.")]
DaysOption = Annotated[float | None, typer.Option("--days", min=0, help="Days until it expires. Default: never.")]


def _ask(data: Path | None, server: str | None, ask: Callable[[ServerClient], Awaitable[Any]]) -> Any:
    from gangline.wire.client.running import find_service

    async def asked() -> Any:
        async with find_service(data, server).client() as client:
            return await ask(client)

    return run(asked())


def _tell_new(new: NewToken, as_json: bool) -> None:
    if as_json:
        print_json(new)
        return
    print(new.token)
    notes().print(
        f"Role {new.view.role}, tenant {new.view.tenant}. Shown this once: set it as GANGLINE_TOKEN.",
        markup=False,
    )


@tokens.command()
def create(
    role: Annotated[Role, typer.Option("--role", help="Its rights.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose tasks it is for.")] = DEFAULT_TENANT,
    note: Annotated[str, typer.Option("--note", help="Its purpose.")] = "",
    days: DaysOption = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a token, and print it once."""
    expires_in_s = None if days is None else days * _DAY_S
    made = {"role": role, "tenant": tenant, "note": note, "expires_in_s": expires_in_s}
    _tell_new(_ask(data, server, lambda client: client.create_token(**made)), as_json)


@tokens.command("list")
def list_tokens(data: DataOption = None, server: ServerOption = None, as_json: JsonOption = False) -> None:
    """List tokens, without their secrets."""
    from gangline.cli.terminal.tables import Column, FactTable, prose

    found: tuple[TokenView, ...] = _ask(data, server, lambda client: client.tokens())
    if as_json:
        print_json(found)
        return
    table = FactTable("token", "role", "tenant", Column("created (UTC)", 1), prose("state"), prose("note"))
    for one in found:
        table.add_row(one.token_id, one.role, one.tenant, _day(one.created_at), _state(one), one.note)
    console().print(table if found else "no tokens: the control token alone opens this server")


@tokens.command()
def rotate(
    token_id: TokenArgument,
    grace_s: Annotated[float, typer.Option("--grace", min=0, help="Seconds that the old secret stays valid.")] = 0.0,
    days: DaysOption = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a token a new secret, and print it once."""
    expires_in_s = None if days is None else days * _DAY_S
    _tell_new(_ask(data, server, lambda client: client.rotate_token(token_id, grace_s, expires_in_s)), as_json)


@tokens.command()
def revoke(
    token_id: TokenArgument, data: DataOption = None, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Revoke a token. It opens nothing more within 2 seconds."""
    view = _ask(data, server, lambda client: client.revoke_token(token_id))
    if as_json:
        print_json(view)
    else:
        console().print(f"{token_id}: revoked", markup=False)


def _state(one: TokenView) -> str:
    if one.revoked_at is not None:
        return f"revoked {_day(one.revoked_at)}"
    states = ["valid"] if one.expires_at is None else [f"until {_day(one.expires_at)}"]
    if one.grace_until is not None:
        states.append(f"old secret until {_day(one.grace_until)}")
    return ", ".join(states)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


tenants = typer.Typer(no_args_is_help=True, help="Show the use of tenants, and set their shares and quotas.")


@tenants.command("list")
def list_tenants(data: DataOption = None, server: ServerOption = None, as_json: JsonOption = False) -> None:
    """Show each tenant's share, quotas and use, the most first."""
    from gangline.cli.terminal.tables import FactTable, prose

    found: tuple[TenantView, ...] = _ask(data, server, lambda client: client.tenants())
    if as_json:
        print_json(found)
        return
    numbers = ("weight#", "run#", "queued#", "slot-hours#", "today#", "tokens#", "today#")
    table = FactTable("tenant", *numbers, prose("quotas"))
    for one in found:
        limits = {name: getattr(one, name) for name in QUOTAS}
        table.add_row(
            one.name,
            f"{one.weight:g}",
            *(f"{number:,}" for number in (one.num_running, one.num_queued)),
            *(f"{seconds / 3600:,.1f}" for seconds in (one.slot_s, one.slot_s_today)),
            *(f"{number:,}" for number in (one.num_sampled_tokens, one.sampled_tokens_today)),
            ", ".join(f"{name} {value:g}" for name, value in limits.items() if value is not None) or "none",
        )
    console().print(table)


@tenants.command("set")
def set_tenant(
    tenant: Annotated[str, typer.Argument(help="A tenant.")],
    changes: Annotated[
        list[str],
        typer.Argument(metavar="NAME=NUMBER...", help=f"weight, {', '.join(QUOTAS)}; NAME= takes a quota away."),
    ],
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set a tenant's weight and quotas."""
    wanted = dict(map(_change, changes))
    view: TenantView = _ask(data, server, lambda client: client.set_tenant(tenant, **wanted))
    if as_json:
        print_json(view)
    else:
        console().print(f"{tenant}: " + ", ".join(f"{name} {getattr(view, name)}" for name in wanted), markup=False)


def _change(text: str) -> tuple[str, float | None]:
    """Raises: InvalidRequest."""
    name, _, number = text.partition("=")
    if name not in ("weight", *QUOTAS):
        raise InvalidRequest(f"{name!r} is none of weight, {', '.join(QUOTAS)}.")
    try:
        value = float(number) if number else None
    except ValueError:
        raise InvalidRequest(f"{name} must be a number, got {number!r}.") from None
    return name, int(value) if value is not None and value.is_integer() else value


def usage(
    by: Annotated[UsageBy, typer.Option("--by", help="What to sum over.")] = "tenant",
    since: Annotated[datetime | None, typer.Option(help="From then on, UTC. Default: all that is kept.")] = None,
    until: Annotated[datetime | None, typer.Option(help="Before then.")] = None,
    prices: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="HOUR TOKENS", help="Of a slot-hour, and of a million sampled tokens; adds the costs."),
    ] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sum up the sessions that have ended: slot-hours, sampled tokens, costs."""
    from gangline.cli.terminal.tables import FactTable

    period = (("since", since), ("until", until))
    params = {name: str(at.replace(tzinfo=UTC).timestamp()) for name, at in period if at is not None}
    rows: list[UsageRow] = _ask(data, server, lambda client: client.usage(by=by, **params))
    of_hour, of_million = prices or (0.0, 0.0)
    costs = [one.slot_s / 3600 * of_hour + one.num_sampled_tokens / 1e6 * of_million for one in rows]
    if as_json:
        priced = zip(rows, costs, strict=True)
        print_json([{**msgspec.structs.asdict(one), "cost": cost} for one, cost in priced] if prices else rows)
        return
    table = FactTable(by, "sessions#", "slot-hours#", "tokens#", *(["cost#"] if prices else []))
    for one, cost in zip(rows, costs, strict=True):
        figures = f"{one.num_sessions:,}", f"{one.slot_s / 3600:,.1f}", f"{one.num_sampled_tokens:,}"
        table.add_row(one.name or "(none)", *figures, *([f"{cost:,.2f}"] if prices else []))
    console().print(table)


def register(app: typer.Typer) -> None:
    app.command()(usage)
    app.add_typer(tokens, name="tokens")
    app.add_typer(tenants, name="tenants")
