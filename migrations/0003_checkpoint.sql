-- The position: everything before it is settled.
CREATE TABLE IF NOT EXISTS outboxd_checkpoint (
  name VARCHAR(64) NOT NULL,
  epoch BIGINT UNSIGNED NOT NULL COMMENT 'that stored it',
  gtid LONGTEXT CHARACTER SET ascii NULL COMMENT 'the set, or what to add to outboxd_gtid',
  gtid_based BOOLEAN NOT NULL DEFAULT FALSE COMMENT 'whether gtid adds to outboxd_gtid',
  server VARCHAR(128) NULL COMMENT 'the server that file and pos belong to',
  file VARCHAR(512) NULL,
  pos BIGINT UNSIGNED NULL,
  sweep BOOLEAN NOT NULL DEFAULT FALSE COMMENT 'rows from before the position are still to be swept',
  by_operator BOOLEAN NOT NULL DEFAULT FALSE COMMENT 'set by hand, and not moved since',
  stored_at DATETIME(6) NOT NULL COMMENT 'UTC',
  PRIMARY KEY (name)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
