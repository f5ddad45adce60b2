"""Keeps what was measured of a model, with its daemon and in a directory, and restores what was kept."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace
from pathlib import Path

import torch

from ftd.config.offload import OffloadConfig
from ftd.errors import FtdError
from ftd.plan import store
from ftd.plan.profile import Identity, Profile
from ftd.plan.strictjson import ProfileError
from ftd_client.phase.known import Known
from ftd_client.phase.model_profile import Static
from ftd_client.profile_exchange import fetch, offer
from ftd_client.stream.units import Param

_log = logging.getLogger("ftd")


class ProfileKeeper:
    """Makes profiles of one model, keeps them, and tells what one says of it.

    Args:
        namespace: whose daemon keeps them too; empty where there is none.
    """

    def __init__(self, static: Static, device: torch.device, namespace: str) -> None:
        self._static = static
        self._device = device
        self._namespace = namespace

    def identity(self, config: OffloadConfig) -> Identity:
        """What a profile of this model is measured on."""
        return self._static.identity(config, self._device)

    def profile(self, known: Known, config: OffloadConfig) -> Profile:
        """
        Raises:
            ProfileError: names that a profile can't tell apart.
        """
        return self._static.profile(self.identity(config), known)

    def restore(self, profile: Profile, known: Known) -> tuple[Known, list[Param]]:
        """What is known by a profile, and the parameters that turn out not to be managed.

        Raises:
            ProfileError: it does not fit this model after all.
        """
        restored = self._static.restore(profile)
        by_it = replace(known, structure=restored.structure, measured=restored.measured, cost=profile.copy)
        return by_it, restored.dropped

    def seed(self, known: Known, config: OffloadConfig) -> Known:
        """What the first plan is made by: what another worker measured, where the daemon knows it."""
        found = fetch(self._namespace, self.identity(config)) if self._namespace else None
        if found is None:
            return known
        with contextlib.suppress(ProfileError):
            restored = self._static.restore(found)
            if not restored.dropped:
                _log.info("the first plan is from a profile that the daemon keeps")
                # its activations were of that worker's inputs
                measured = replace(restored.measured, activation_bytes=None)
                return replace(known, structure=restored.structure, measured=measured)
        return known

    def keep(self, known: Known, config: OffloadConfig) -> None:
        """Keeps what was just measured where the configuration and the namespace say."""
        if not known.measured.known:
            return
        try:
            profile = self.profile(known, config)
        except ProfileError as error:  # nothing to stop a forward for
            _log.warning("what was measured makes no profile: %s", error.message)
            return
        if self._namespace:
            # in a thread: a hung daemon must not hold up a forward, whose lock is held here
            args = (self._namespace, profile)
            threading.Thread(target=offer, args=args, name="ftd-profile", daemon=True).start()
        if config.profile_storage_dir and not config.profile_read_only:
            try:
                store.save(Path(config.profile_storage_dir), profile)
            except FtdError as error:
                _log.warning("the profile is not stored: %s", error.message)
