-- The epoch that may write. Every writing transaction takes a shared lock on its row; whoever
-- takes the lease changes it, and so waits for the last write of the epoch before.
CREATE TABLE IF NOT EXISTS outboxd_fence (
  name VARCHAR(64) NOT NULL,
  epoch BIGINT UNSIGNED NOT NULL,
  PRIMARY KEY (name)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
