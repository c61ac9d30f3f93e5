-- The store of gpuhub 0.1.0, written by its own code: notebooks that run, one on half a GPU, one that waits,
-- one that ended, and a detached job that runs.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0004');
CREATE TABLE cordons (
	node VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	"by" VARCHAR(64) NOT NULL, 
	reason TEXT NOT NULL, 
	at FLOAT NOT NULL, 
	grace_s INTEGER NOT NULL, 
	CONSTRAINT pk_cordons PRIMARY KEY (node)
);
CREATE TABLE events (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at FLOAT NOT NULL, 
	kind VARCHAR(64) NOT NULL, 
	text TEXT NOT NULL, 
	owner VARCHAR(64), 
	lease VARCHAR(40), 
	job VARCHAR(40), 
	node VARCHAR(64)
);
INSERT INTO "events" VALUES(1,1001.0,'lease.granted','granted','ada','l-ada',NULL,NULL);
CREATE TABLE gpu_modes (
	gpu_uuid VARCHAR(80) NOT NULL, 
	share INTEGER NOT NULL, 
	CONSTRAINT pk_gpu_modes PRIMARY KEY (gpu_uuid), 
	CONSTRAINT uq_gpu_modes_gpu_uuid_share UNIQUE (gpu_uuid, share)
);
INSERT INTO "gpu_modes" VALUES('GPU-1',1);
INSERT INTO "gpu_modes" VALUES('GPU-2',2);
INSERT INTO "gpu_modes" VALUES('GPU-3',1);
CREATE TABLE gpus (
	uuid VARCHAR(80) NOT NULL, 
	node VARCHAR(64) NOT NULL, 
	"index" INTEGER NOT NULL, 
	model VARCHAR(80) NOT NULL, 
	memory_mib INTEGER NOT NULL, 
	seen_at FLOAT NOT NULL, capability VARCHAR(8), is_mig BOOLEAN DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_gpus PRIMARY KEY (uuid)
);
INSERT INTO "gpus" VALUES('GPU-1','rig1',0,'RTX 5090',32607,1000.0,'12.0',0);
CREATE TABLE held_gpus (
	gpu_uuid VARCHAR(80) NOT NULL, 
	part INTEGER NOT NULL, 
	share INTEGER NOT NULL, 
	lease_id VARCHAR(40) NOT NULL, 
	CONSTRAINT pk_held_gpus PRIMARY KEY (gpu_uuid, part), 
	CONSTRAINT fk_held_gpus_lease_id FOREIGN KEY(lease_id) REFERENCES leases (id), 
	CONSTRAINT fk_held_gpus_gpu_uuid_share FOREIGN KEY(gpu_uuid, share) REFERENCES gpu_modes (gpu_uuid, share), 
	CONSTRAINT ck_held_gpus_part CHECK (part >= 0 AND part < share)
);
INSERT INTO "held_gpus" VALUES('GPU-1',0,1,'l-ada');
INSERT INTO "held_gpus" VALUES('GPU-2',1,2,'l-ben');
INSERT INTO "held_gpus" VALUES('GPU-3',0,1,'l-job');
CREATE TABLE jobs (
	id VARCHAR(40) NOT NULL, 
	run_id VARCHAR(64) NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	server VARCHAR(64) NOT NULL, 
	notebook_lease VARCHAR(40), 
	lease_id VARCHAR(40) NOT NULL, 
	image VARCHAR(255) NOT NULL, 
	nnodes INTEGER NOT NULL, 
	nproc_per_node INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	since FLOAT NOT NULL, 
	created_at FLOAT NOT NULL, 
	ended_at FLOAT, 
	reason TEXT, 
	version BIGINT NOT NULL, min_nnodes INTEGER DEFAULT '1' NOT NULL, gpus INTEGER, array VARCHAR(64), preemptions INTEGER DEFAULT '0' NOT NULL, checkpoint_until FLOAT, detached BOOLEAN DEFAULT 0 NOT NULL, name VARCHAR(80) DEFAULT '' NOT NULL, joins VARCHAR(64), first_worker INTEGER DEFAULT '0' NOT NULL, started_at FLOAT, exit_code INTEGER, 
	CONSTRAINT pk_jobs PRIMARY KEY (id), 
	CONSTRAINT fk_jobs_lease_id FOREIGN KEY(lease_id) REFERENCES leases (id), 
	CONSTRAINT uq_jobs_owner_run_id UNIQUE (owner, run_id)
);
INSERT INTO "jobs" VALUES('j-1','run-1','ada','',NULL,'l-job','gpuhub/notebook:latest',1,1,'running',1006.0,1005.0,NULL,NULL,9,1,NULL,NULL,0,NULL,1,'train.py',NULL,0,1006.0,NULL);
CREATE TABLE lease_gpus (
	lease_id VARCHAR(40) NOT NULL, 
	gpu_uuid VARCHAR(80) NOT NULL, 
	node VARCHAR(64) NOT NULL, 
	"index" INTEGER NOT NULL, 
	model VARCHAR(80) NOT NULL, 
	memory_mib INTEGER NOT NULL, 
	worker INTEGER NOT NULL, 
	released_at FLOAT, share INTEGER DEFAULT '1' NOT NULL, part INTEGER DEFAULT '0' NOT NULL, shed_at FLOAT, 
	CONSTRAINT pk_lease_gpus PRIMARY KEY (lease_id, gpu_uuid), 
	CONSTRAINT fk_lease_gpus_lease_id FOREIGN KEY(lease_id) REFERENCES leases (id)
);
INSERT INTO "lease_gpus" VALUES('l-old','GPU-1','rig1',0,'RTX 5090',32607,0,900.0,1,0,NULL);
INSERT INTO "lease_gpus" VALUES('l-ada','GPU-1','rig1',0,'RTX 5090',32607,0,NULL,1,0,NULL);
INSERT INTO "lease_gpus" VALUES('l-ben','GPU-2','rig2',0,'RTX 5070',12227,0,NULL,2,1,NULL);
INSERT INTO "lease_gpus" VALUES('l-job','GPU-3','rig3',0,'RTX 5060',8151,0,NULL,1,0,NULL);
CREATE TABLE leases (
	id VARCHAR(40) NOT NULL, 
	seq INTEGER NOT NULL, 
	"key" VARCHAR(128) NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	purpose VARCHAR(16) NOT NULL, 
	subject VARCHAR(64) NOT NULL, 
	profile VARCHAR(64), 
	ask JSON NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	since FLOAT NOT NULL, 
	epoch INTEGER NOT NULL, 
	time_limit_s INTEGER, 
	created_at FLOAT NOT NULL, 
	granted_at FLOAT, 
	expires_at FLOAT, 
	released_at FLOAT, 
	reason TEXT, 
	container_id VARCHAR(64), 
	nodes JSON NOT NULL, 
	version BIGINT NOT NULL, groups JSON DEFAULT '[]' NOT NULL, note TEXT, quarantined_at FLOAT, identities JSON DEFAULT '{}' NOT NULL, slurm_job BIGINT, 
	CONSTRAINT pk_leases PRIMARY KEY (id), 
	CONSTRAINT uq_leases_seq UNIQUE (seq)
);
INSERT INTO "leases" VALUES('l-old',5,'nb:dee:','dee','notebook','','rtx5090','{}','released',900.0,1,NULL,790.0,800.0,NULL,900.0,'stopped',NULL,'["rig1"]',2,'["lab"]',NULL,NULL,'{}',NULL);
INSERT INTO "leases" VALUES('l-ada',1,'nb:ada:','ada','notebook','','rtx5090','{"models": ["RTX 5090"]}','active',1003.0,1,28800,1000.0,1001.0,29801.0,NULL,NULL,'cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc','["rig1"]',4,'["lab"]',NULL,NULL,'{"rig1": ["DAEMON1", "boot1"]}',NULL);
INSERT INTO "leases" VALUES('l-ben',2,'nb:ben:x','ben','notebook','x','rtx5090','{"share": 2}','active',1004.0,1,NULL,1000.0,1002.0,NULL,NULL,NULL,'dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd','["rig2"]',6,'["lab"]',NULL,NULL,'{"rig2": ["DAEMON2", null]}',NULL);
INSERT INTO "leases" VALUES('l-cyd',3,'nb:cyd:','cyd','notebook','','rtx5090','{"models": ["RTX 5090"], "exclude": ["rig3"]}','requested',1005.0,0,NULL,1000.0,NULL,NULL,NULL,NULL,NULL,'[]',7,'["lab"]',NULL,NULL,'{}',NULL);
INSERT INTO "leases" VALUES('l-job',4,'job:run-1','ada','job','run-1',NULL,'{}','active',1006.0,1,NULL,1000.0,1005.5,NULL,NULL,NULL,NULL,'["rig3"]',9,'["lab"]',NULL,NULL,'{"rig3": ["DAEMON3", "boot3"]}',NULL);
CREATE TABLE reservations (
	id VARCHAR(40) NOT NULL, 
	name TEXT NOT NULL, 
	nodes JSON NOT NULL, 
	gpus JSON NOT NULL, 
	users JSON NOT NULL, 
	groups JSON NOT NULL, 
	starts_at FLOAT NOT NULL, 
	ends_at FLOAT NOT NULL, 
	created_by VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_reservations PRIMARY KEY (id)
);
CREATE TABLE workers (
	job_id VARCHAR(40) NOT NULL, 
	"index" INTEGER NOT NULL, 
	node VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	container_id VARCHAR(64), 
	exit_code INTEGER, 
	message TEXT, 
	CONSTRAINT pk_workers PRIMARY KEY (job_id, "index"), 
	CONSTRAINT fk_workers_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
INSERT INTO "workers" VALUES('j-1',0,'rig3','running','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',NULL,NULL);
CREATE INDEX ix_leases_state ON leases (state);
CREATE INDEX ix_jobs_state ON jobs (state);
CREATE INDEX ix_gpus_node ON gpus (node);
CREATE UNIQUE INDEX ux_leases_owner_key ON leases (owner, "key");
CREATE INDEX ix_lease_gpus_released_at ON lease_gpus (released_at);
CREATE INDEX ix_events_owner ON events (owner);
CREATE INDEX ix_jobs_owner_ended_at ON jobs (owner, ended_at);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',1);
COMMIT;
