BEGIN TRANSACTION;
CREATE TABLE events (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at FLOAT NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	task_id VARCHAR(128), 
	session_id VARCHAR(128), 
	data TEXT NOT NULL
);
INSERT INTO "events" VALUES(1,1000.0,'task.submitted','done',NULL,'{"num_samples":1,"harness":"shell"}');
INSERT INTO "events" VALUES(2,1000.0,'task.submitted','half',NULL,'{"num_samples":3,"harness":"shell"}');
INSERT INTO "events" VALUES(3,1000.0,'task.submitted','waiting',NULL,'{"num_samples":2,"harness":"shell"}');
INSERT INTO "events" VALUES(4,1000.0,'node.joined',NULL,NULL,'{"node":"n1","url":"http://node.test"}');
INSERT INTO "events" VALUES(5,1000.0,'task.started','done',NULL,'{}');
INSERT INTO "events" VALUES(6,1000.0,'session.leased','done','done.0','{"node":"n1","attempt":1,"fence":1}');
INSERT INTO "events" VALUES(7,1001.0,'session.ended','done','done.0','{"outcome":"completed","attempt":1,"node":"n1","reward":1.0,"code":null}');
INSERT INTO "events" VALUES(8,1001.0,'task.ended','done',NULL,'{"status":"ended"}');
INSERT INTO "events" VALUES(9,1001.0,'task.started','half',NULL,'{}');
INSERT INTO "events" VALUES(10,1001.0,'session.leased','half','half.0','{"node":"n1","attempt":1,"fence":1}');
INSERT INTO "events" VALUES(11,1001.0,'session.leased','half','half.1','{"node":"n1","attempt":1,"fence":1}');
INSERT INTO "events" VALUES(12,1002.0,'session.requeued','half','half.0','{"node":"n1","attempt":2,"code":"engine_unavailable"}');
CREATE TABLE meta (
	"key" VARCHAR(64) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema_version','1');
CREATE TABLE nodes (
	node_id VARCHAR(128) NOT NULL, 
	url TEXT NOT NULL, 
	capacity INTEGER NOT NULL, 
	draining BOOLEAN NOT NULL, 
	backends TEXT NOT NULL, 
	metrics TEXT NOT NULL, 
	first_seen_at FLOAT NOT NULL, 
	last_seen_at FLOAT NOT NULL, 
	PRIMARY KEY (node_id)
);
INSERT INTO "nodes" VALUES('n1','http://node.test',0,0,'[]','{}',1000.0,1001.0);
CREATE TABLE outbox (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	"key" VARCHAR(200) NOT NULL, 
	task_id VARCHAR(128) NOT NULL, 
	url TEXT NOT NULL, 
	body TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	num_tries INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	next_at FLOAT NOT NULL, 
	expires_at FLOAT NOT NULL, 
	last_error TEXT, 
	UNIQUE ("key"), 
	FOREIGN KEY(task_id) REFERENCES tasks (task_id)
);
INSERT INTO "outbox" VALUES(1,'done:ended','done','http://trainer.test/done','{"task_id":"done","status":"ended","rewards":[1.0],"outcomes":["completed"],"metadata":{"step":7}}','pending',0,1001.0,1001.0,87401.0,NULL);
CREATE TABLE sessions (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	session_id VARCHAR(128) NOT NULL, 
	task_id VARCHAR(128) NOT NULL, 
	sample_index INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	attempt INTEGER NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	fence BIGINT NOT NULL, 
	reported_fence BIGINT NOT NULL, 
	node_id VARCHAR(128), 
	stage VARCHAR(16), 
	outcome VARCHAR(32), 
	failure TEXT, 
	reward FLOAT, 
	result_attempt INTEGER, 
	created_at FLOAT NOT NULL, 
	leased_at FLOAT, 
	stage_at FLOAT, 
	expires_at FLOAT, 
	ended_at FLOAT, 
	UNIQUE (session_id), 
	FOREIGN KEY(task_id) REFERENCES tasks (task_id)
);
INSERT INTO "sessions" VALUES(1,'done.0','done',0,'ended',1,2,1,1,'n1',NULL,'completed',NULL,1.0,1,1000.0,1000.0,NULL,NULL,1001.0);
INSERT INTO "sessions" VALUES(2,'half.0','half',0,'queued',2,3,1,1,'n1',NULL,NULL,'{"boundary":"engine","code":"engine_unavailable","message":"down","retryable":true}',NULL,NULL,1000.0,1001.0,NULL,NULL,NULL);
INSERT INTO "sessions" VALUES(3,'half.1','half',1,'leased',1,3,1,0,'n1',NULL,NULL,NULL,NULL,NULL,1000.0,1001.0,NULL,1031.0,NULL);
INSERT INTO "sessions" VALUES(4,'half.2','half',2,'queued',1,3,0,0,NULL,NULL,NULL,NULL,NULL,NULL,1000.0,NULL,NULL,NULL,NULL);
INSERT INTO "sessions" VALUES(5,'waiting.0','waiting',0,'queued',1,3,0,0,NULL,NULL,NULL,NULL,NULL,NULL,1000.0,NULL,NULL,NULL,NULL);
INSERT INTO "sessions" VALUES(6,'waiting.1','waiting',1,'queued',1,3,0,0,NULL,NULL,NULL,NULL,NULL,NULL,1000.0,NULL,NULL,NULL,NULL);
CREATE TABLE tasks (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	task_id VARCHAR(128) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	body TEXT NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	num_samples INTEGER NOT NULL, 
	num_open INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT, 
	ended_at FLOAT, 
	UNIQUE (task_id)
);
INSERT INTO "tasks" VALUES(1,'done','f1aa89ccf8f1992fcb5ffa6b93149eed271e3cd046772a6a592aca0d172116e0','{"task_id":"done","instruction":"do it","num_samples":1,"timeout_seconds":1200.0,"init_timeout_seconds":300.0,"evaluation_timeout_seconds":300.0,"max_attempts":2,"runtime":{"backend":"sandbox","image":null,"network":"proxy","workdir":"/workspace","env":{},"prepare":[],"limits":{"memory_bytes":null,"cpus":null,"max_pids":512,"max_file_bytes":null}},"agent":{"harness":"shell","model_name":null,"settings":{},"env":{},"max_turns":null},"capture":{"tier":"auto","thinking":"follow_template","sampling":null,"volatile_system_text":null},"builder":{"strategy":"prefix_merging"},"evaluator":{"strategy":"session_completed","config":{},"refresh_runtime":false},"callback_url":"http://trainer.test/done","metadata":{"step":7}}','ended',1,0,1000.0,1000.0,1001.0);
INSERT INTO "tasks" VALUES(2,'half','63bc6fe411399720af799e47bf3c482e75faa9944923d6eae5c6f49e15b516cf','{"task_id":"half","instruction":"half done","num_samples":3,"timeout_seconds":1200.0,"init_timeout_seconds":300.0,"evaluation_timeout_seconds":300.0,"max_attempts":3,"runtime":{"backend":"sandbox","image":null,"network":"proxy","workdir":"/workspace","env":{},"prepare":[],"limits":{"memory_bytes":null,"cpus":null,"max_pids":512,"max_file_bytes":null}},"agent":{"harness":"shell","model_name":null,"settings":{},"env":{},"max_turns":null},"capture":{"tier":"auto","thinking":"follow_template","sampling":null,"volatile_system_text":null},"builder":{"strategy":"prefix_merging"},"evaluator":{"strategy":"session_completed","config":{},"refresh_runtime":false},"callback_url":null,"metadata":{}}','running',3,3,1000.0,1001.0,NULL);
INSERT INTO "tasks" VALUES(3,'waiting','73be2ca253895ac6b89fd4de8eb58a47bc05f4e4570b2d40a57661f9868540da','{"task_id":"waiting","instruction":"do it","num_samples":2,"timeout_seconds":1200.0,"init_timeout_seconds":300.0,"evaluation_timeout_seconds":300.0,"max_attempts":3,"runtime":{"backend":"sandbox","image":null,"network":"proxy","workdir":"/workspace","env":{},"prepare":[],"limits":{"memory_bytes":null,"cpus":null,"max_pids":512,"max_file_bytes":null}},"agent":{"harness":"shell","model_name":null,"settings":{},"env":{},"max_turns":null},"capture":{"tier":"auto","thinking":"follow_template","sampling":null,"volatile_system_text":null},"builder":{"strategy":"prefix_merging"},"evaluator":{"strategy":"session_completed","config":{},"refresh_runtime":false},"callback_url":null,"metadata":{}}','queued',2,2,1000.0,NULL,NULL);
CREATE INDEX tasks_by_status ON tasks (status, position);
CREATE INDEX events_by_task ON events (task_id, seq);
CREATE INDEX sessions_by_state ON sessions (state, position);
CREATE INDEX sessions_by_expiry ON sessions (expires_at) WHERE state = 'leased';
CREATE INDEX sessions_by_task ON sessions (task_id, sample_index);
CREATE INDEX outbox_due ON outbox (state, next_at);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('tasks',3);
INSERT INTO "sqlite_sequence" VALUES('sessions',6);
INSERT INTO "sqlite_sequence" VALUES('events',12);
INSERT INTO "sqlite_sequence" VALUES('outbox',1);
COMMIT;
