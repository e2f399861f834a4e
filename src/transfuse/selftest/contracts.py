"""The contracts that there are."""

from __future__ import annotations

from typing import Final

from transfuse.selftest import anthropic_client, claude_code, codex, openai_client
from transfuse.selftest.checks import Contract

CONTRACTS: Final[dict[str, Contract]] = {
    contract.client: contract
    for contract in (openai_client.CONTRACT, anthropic_client.CONTRACT, codex.CONTRACT, claude_code.CONTRACT)
}
