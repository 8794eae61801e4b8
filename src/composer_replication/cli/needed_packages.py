"""``needs_extra`` for ``launch_verb``, which still looks for it here."""

from composer_replication.errors import needs_extra

__all__ = ["needs_extra"]
