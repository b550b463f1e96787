-- Who leads. Touched by acquiring and renewing only, so that no transaction of a flush keeps a
-- renewal waiting.
CREATE TABLE IF NOT EXISTS outboxd_lease (
  name VARCHAR(64) NOT NULL,
  owner VARCHAR(64) NOT NULL COMMENT 'token of the process; empty: given back',
  instance VARCHAR(255) NOT NULL,
  epoch BIGINT UNSIGNED NOT NULL COMMENT 'raised by every take-over and by an operator who moves the position',
  lease_until DATETIME(6) NOT NULL COMMENT 'UTC',
  acquired_at DATETIME(6) NOT NULL COMMENT 'UTC',
  renewed_at DATETIME(6) NOT NULL COMMENT 'UTC',
  PRIMARY KEY (name)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
