-- Instances that wait for the lease.
CREATE TABLE IF NOT EXISTS outboxd_instance (
  name VARCHAR(64) NOT NULL,
  instance VARCHAR(255) NOT NULL,
  seen_at DATETIME(6) NOT NULL COMMENT 'UTC',
  PRIMARY KEY (name, instance)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
