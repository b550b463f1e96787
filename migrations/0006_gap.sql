-- Stretches of the binlog that could not be read.
CREATE TABLE IF NOT EXISTS outboxd_gap (
  id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
  name VARCHAR(64) NOT NULL,
  gap_from LONGTEXT NULL COMMENT 'the position that was lost',
  gap_to LONGTEXT NULL COMMENT 'where reading went on',
  reason TEXT NOT NULL,
  found_at DATETIME(6) NOT NULL COMMENT 'UTC',
  acknowledged_at DATETIME(6) NULL COMMENT 'UTC',
  PRIMARY KEY (id),
  KEY by_name (name, acknowledged_at, id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
