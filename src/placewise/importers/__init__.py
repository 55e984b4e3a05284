"""Problems and graphs from other people's files, one format per module. What they hold is checked before it is used."""
