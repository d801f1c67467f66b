"""The compiled part: `extension` compiles it, `library` finds and loads it."""
