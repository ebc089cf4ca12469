"""What sharing drafts has come to so far, as the driver tells the front."""

from __future__ import annotations

import msgspec


class DraftCounts(msgspec.Struct, array_like=True):
    """Counts since the driver began; each is written by one thread only."""

    sent: int = 0
    """Outputs that the store has taken."""
    unsent: int = 0
    """Outputs dropped because the store was too slow, away, or refused them."""
    learnt: int = 0
    """Outputs of other replicas that drafts come from now."""
    own: int = 0
    """Entries of the stream that this replica wrote, and so knows."""
    duplicate: int = 0
    malformed: int = 0
    """Entries that are none of ours, or not whole."""
    passed_over: int = 0
    """Times that the stream was gone on with behind an answer too long to read."""
    sent_tokens: int = 0
    learnt_tokens: int = 0
    outside_vocabulary: int = 0
    """Token ids dropped because the model has no such token."""
    write_errors: int = 0
    read_errors: int = 0
    snapshot_errors: int = 0
    snapshots_written: int = 0
    snapshots_loaded: int = 0
    write_up: bool = False
    """Did the store take what it was sent last?"""
    read_up: bool = False
    """Did the store answer when it was last asked for news?"""
    send_queue: int = 0
    """Outputs that wait to be sent."""
    learn_queue: int = 0
    """Outputs that wait to be learnt."""
    lag: float = 0.0
    """Seconds from when the newest output that was learnt came into the store to when it was learnt."""
