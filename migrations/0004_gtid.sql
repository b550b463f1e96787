-- A long GTID set, rewritten now and then; outboxd_checkpoint holds what came since.
CREATE TABLE IF NOT EXISTS outboxd_gtid (
  name VARCHAR(64) NOT NULL,
  gtid_set LONGTEXT CHARACTER SET ascii NOT NULL,
  PRIMARY KEY (name)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
