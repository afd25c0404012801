"""A plugin that cannot be imported: it must be reported once and skipped."""

raise ImportError("this plugin is broken on purpose")
